"""The interface of a rollout engine, the records that go in, and where a stop string ends a response."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlreason.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlreason.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to continue. `seed` alone decides the random numbers of its samples, whatever else is in the batch."""

    problem_id: str
    token_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings, shared by engine and trainer. There is no top-k, top-p or penalty: the distribution sampled
    from is the one trained on."""

    temperature: float = 1.0  # 0 means greedy
    min_tokens: int = 0  # no end token and no end of a stop string among this many first tokens
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()  # kept in the text, special tokens excepted; its tokens are kept whole
    tags: tuple[str, ...] = ()  # special tokens that stay in the text, because the task reads them
    end_ids: frozenset[int] = frozenset()  # end tokens in addition to the model's own, such as the end of a chat turn


@dataclass(frozen=True, slots=True)
class Demand:
    """The largest request that a run makes: an engine with its own copy of the weights plans its memory for it."""

    longest: int  # tokens of the longest prompt with a full response
    rows: int  # responses requested in one call
    reserve: int = 0  # bytes that the trainer allocates later, which the engine leaves free


Finished = Callable[[int, Response], None]


class Engine(Protocol):
    """Sample responses to prompts with the most recently loaded weights."""

    weight_version: int  # counts weight syncs; stamped on every response
    drawn: int  # tokens sampled since the last `generate` began, for the progress display; approximate for vLLM

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; return them prompt by prompt, in the given order.

        `finished(place, response)` is called as soon as a response has ended, with its index in the returned list, so
        that grading overlaps with sampling.
        """

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Load these weights; return the sync's metrics: seconds, train-inference mismatch."""

    def close(self) -> None:
        """Stop what the engine has started and free its memory. The engine cannot be used afterwards."""


def seed_for(*parts: object) -> int:
    """Hash a run's seed, a step and a problem id to a 63-bit seed: the same on every machine and in any order."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


HALF_CHARACTER = "\ufffd"  # decoded from the bytes of an incomplete character


class Stops:
    """The stop strings of a sampling setting, under one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        self.tokenizer, self.stop, self.min_tokens = tokenizer, sampling.stop, sampling.min_tokens
        special = special_tokens(tokenizer)
        self._left_out = {i for i, text in special.items() if text not in sampling.tags}
        has_tags = len(self._left_out) < len(special)
        self.sees_special = has_tags or any(text in s for text in special.values() for s in self.stop)

    def overhang(self, token_ids: Sequence[int]) -> int | None:
        """Return how many characters follow the stop string that ends these tokens; None where none does.

        These characters belong to the last token, which is kept whole.
        """
        if not self.stop or len(token_ids) <= self.min_tokens:
            return None
        text = self._decoded(token_ids, self.sees_special)
        early = len(self._decoded(token_ids[: self.min_tokens], self.sees_special).rstrip(HALF_CHARACTER))
        starts = {s: text.find(s, max(0, early - len(s) + 1)) for s in self.stop}
        ends = [start + len(s) for s, start in starts.items() if start >= 0]
        return len(text) - min(ends) if ends else None

    def text(self, token_ids: Sequence[int], overhang: int | None) -> str:
        """Return the text for grading and display: without special tokens except tags, and without the overhang."""
        text = self._decoded(token_ids, special=False)
        return text[: len(text) - overhang] if overhang and token_ids[-1] not in self._left_out else text

    def _decoded(self, token_ids: Sequence[int], special: bool) -> str:
        kept = [i for i in token_ids if special or i not in self._left_out]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def tags_in(tokenizer: PreTrainedTokenizerBase, read: Iterable[str], always: Collection[str]) -> tuple[str, ...]:
    """Return the special tokens that a task reads: those that contain one of `always`, and those in a text of `read`.

    Of the latter, tokens that structure texts and chats are left out: those with a role (end, padding), in the chat
    template, or spelled like `<|im_end|>`. They never appear in a response's text.
    """
    texts, template = "\0".join(read), str(getattr(tokenizer, "chat_template", None) or "")
    roles = {str(getattr(tokenizer, role, None)) for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    return tuple(
        text
        for text in special_tokens(tokenizer).values()
        if any(tag in text for tag in always)
        or (text in texts and text not in roles and text not in template and not text.startswith("<|"))
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return every special token by id, also those without a role such as end or padding."""
    flagged = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return flagged | {i: str(token) for i, token in named}


def closing_tokens(vocabulary: Mapping[str, int], stop: Sequence[str]) -> frozenset[int]:
    """Return the tokens that can complete a stop string: those whose text contains one of its last characters.

    Any token may where vocabularies spell this character differently: white space, and characters outside ASCII, which
    can be split over several tokens.

    >>> sorted(closing_tokens({"a": 0, "b>": 1, "<0x3E>": 2, "<0x41>": 3}, ["</A"]))
    [3]
    """
    last = {s[-1] for s in stop}
    if not all(c.isascii() and c.isprintable() and not c.isspace() for c in last):
        return frozenset(vocabulary.values())
    spellings = {*last, *(f"<0x{ord(c):02X}>" for c in last)}  # the second: single bytes, in some vocabularies
    return frozenset(i for piece, i in vocabulary.items() if any(s in piece for s in spellings))
