"""The tokenizers and the small model that functions are tried with."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlreason.data.tasks import make_stories

WORDS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "what",
    "is",
    "two",
    "plus",
    "three",
    "?",
    "four",
    "five",
    "six",
    "so",
    ".",
    "seven",
    "minus",
    "one",
    "nine",
]
TEXTS = ("what is two plus three?", "the apples are red, the pens are blue", "7+3=10 10-4=6", "bananas and cabbages")


class ToldTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that says in a finding what it is."""

    told = "a tokenizer"


@cache
def word_tokenizer(pad: str = "<pad>", adds_begin: bool = False) -> Any:
    """One token per word; with `adds_begin` it puts a begin token before every text unless told not to."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if adds_begin:
        begin = ("<bos>", WORDS.index("<bos>"))
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])  # type: ignore[assignment]
    tokenizer = ToldTokenizer(tokenizer_object=core, pad_token=pad, eos_token="<eos>", bos_token="<bos>")
    told = "one token per word, ids " + ", ".join(f"{word} {i}" for i, word in enumerate(WORDS[:2]))
    tokenizer.told = told + f"; pad_token {pad}" + ("; puts <bos> before every text" if adds_begin else "")
    return tokenizer


@cache
def byte_tokenizer() -> Any:
    """Pairs of bytes merged as in real models: two texts tokenized apart need not be the ids of the joined text."""
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
    tokenizer = ToldTokenizer(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.told = "byte pairs, as real models have them"
    return tokenizer


@cache
def story_tokenizer() -> Any:
    """Byte pairs learned from the built-in number stories."""
    from rlreason.model.tiny import build_tokenizer

    texts = [f"{story.question} {story.solution}" for story in make_stories(60, 0)]
    return build_tokenizer(texts, vocab_size=330)


def small_model(seed: int = 0, vocab: int = len(WORDS)) -> Any:
    """A random Llama of one layer over the words above."""
    from rlreason.model.tiny import build_model  # here, because transformers' models take a second to import

    model = build_model(vocab, width=16, layers=1, heads=2, init_scale=0.5, seed=seed).eval()
    model.told = "a small random Llama"
    return model
