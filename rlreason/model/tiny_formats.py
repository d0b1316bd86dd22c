"""The texts of the tiny model: formats of question and response, and the tokenizer trained on them.

Imported without torch, so that prompts can be measured before anything slow is loaded.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlreason.data.stories_habits import habit_trace
from rlreason.types import Problem

END = "<|endoftext|>"
PAD = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
VOCABULARY = 2048  # tokens at most: enough to make every word of every shipped prompt one token


@dataclass(frozen=True, slots=True)
class Format:
    """How a question becomes a prompt, and how a response to it is written."""

    prompt: Callable[[str], str]  # a question -> its prompt
    trace: str  # a template with {solution} and {answer}


def texts_in(formats: Sequence[Format], problems: Sequence[Problem]) -> Iterator[str]:
    """The texts that the tokenizer is trained on: prompts and responses in all formats, the same for every seed."""
    rng = random.Random("tokenizer")
    for problem, form in zip(problems[:2000], cycle(dict.fromkeys(formats)), strict=False):
        yield form.prompt(problem.question) + habit_trace(problem, rng, 0.5, 0.0, form.trace)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `texts`: any string survives encoding and decoding.

    A number of up to two digits is one token. The tags are not in it yet: see `tiny.build_tokenizer`.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}| ?[^\s\d]+ ?|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core
