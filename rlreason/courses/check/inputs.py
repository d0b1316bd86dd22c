"""Make the inputs of the trial calls: tokenizers, a small model, masks, log-probabilities, advantages."""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlreason.data.tasks import make_stories

WORDS = [
    "<pad>", "<eos>", "<bos>", "what", "is", "two", "plus", "three", "?", "four", "five", "six", "so", ".", "seven",
    "minus", "one", "nine",
]  # fmt: skip
TEXTS = ("what is two plus three?", "the apples are red, the pens are blue", "7+3=10 10-4=6", "bananas and cabbages")


class DescribedTokenizer(PreTrainedTokenizerFast):
    """A tokenizer with the text that stands for it in a finding."""

    description = "a tokenizer"


@cache
def word_tokenizer(pad: str = "<pad>", adds_begin: bool = False) -> Any:
    """Return a tokenizer of one token per word; `adds_begin` makes it put <bos> first when special tokens are added."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if adds_begin:
        begin = ("<bos>", WORDS.index("<bos>"))
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])  # type: ignore[assignment]
    tokenizer = DescribedTokenizer(tokenizer_object=core, pad_token=pad, eos_token="<eos>", bos_token="<bos>")
    tokenizer.description = f"one token per word, ids <pad> 0, <eos> 1; pad_token {pad}"
    if adds_begin:
        tokenizer.description += "; puts <bos> before every text"
    return tokenizer


@cache
def byte_tokenizer() -> Any:
    """Return a byte-pair tokenizer, whose ids of two texts need not be those of the joined text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(list(TEXTS) * 4, trainer)
    tokenizer = DescribedTokenizer(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.description = "byte pairs, as real models have them"
    return tokenizer


@cache
def story_tokenizer() -> Any:
    """Return a byte-pair tokenizer trained on the built-in number stories."""
    from rlreason.model.tiny import build_tokenizer

    texts = [f"{story.question} {story.solution}" for story in make_stories(60, 0)]
    return build_tokenizer(texts, vocab_size=330)


def small_model(seed: int = 0, vocab: int = len(WORDS)) -> Any:
    """Return a random Llama of one layer over `vocab` tokens."""
    from rlreason.model.tiny import build_model  # here, because transformers' models take a second to import

    model = build_model(vocab, width=16, layers=1, heads=2, init_scale=0.5, seed=seed).eval()
    model.description = "a small random Llama"
    return model


#: Log-ratios inside, near and far outside the clip range, on both sides.
GAPS = (0.0, 0.9, -0.7, 0.12, -0.13, 0.35, -1.4, 1.6, -0.3, 0.05, -0.06, 0.22)


def random(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def ragged_mask(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """Return a mask (batch, width) bool, true on `length` positions from `start` on, for every (start, length)."""
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (start, length) in enumerate(lengths):
        mask[row, start : start + length] = True
    return mask


def log_probs(rows: int, width: int, seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (policy, old) log-probabilities (rows, width), with larger ratios where the mask is false."""
    policy = -0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))
    gap = torch.tensor(GAPS)[torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))]
    if mask is not None:
        policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)
    return policy, policy - gap


def advantages(rows: int, seed: int) -> Tensor:
    """Return advantages (rows, 1) of both signs and different sizes."""
    values = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.25, 2.1, -1.1])
    return values.roll(seed)[:rows, None].clone()


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """Return d sum(weights x value) / d leaf, summed over `where`; zeros if value does not depend on leaf.

    The weights are fixed numbers between 0.5 and 1.5, one for each element, which tells elements apart.
    """
    weights = 0.5 + torch.rand(value.shape, generator=random(9), dtype=torch.float32).to(value.dtype)
    weighed = weights * (value if where is None else value * where.to(value.dtype))
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (grad,) = torch.autograd.grad(weighed.sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad.detach()
