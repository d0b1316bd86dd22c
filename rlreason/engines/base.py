"""The interface of a rollout engine: `generate`, `load_weights`, `close`; and the records that go in."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlreason.types import Response

if TYPE_CHECKING:  # Prompt and Sampling are imported without torch
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


Finished = Callable[[int, Response], None]


class Engine(Protocol):
    """Sample responses to prompts with the most recently loaded weights."""

    weight_version: int  # counts weight syncs; stamped on every response

    @property
    def drawn(self) -> int:
        """Tokens sampled since the last `generate` began, for the progress display; approximate for vLLM."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; return them prompt by prompt, in the given order.

        `finished(place, response)` is called as soon as a response has ended, with its index in the returned list, so
        that grading overlaps with sampling.
        """
        ...

    def load_weights(self, policy: "Policy") -> dict[str, float]:
        """Load these weights; return the sync's metrics: seconds, train-inference mismatch."""
        ...

    def close(self) -> None:
        """Stop what the engine has started and free its memory. The engine cannot be used afterwards."""
        ...


def seed_for(*parts: object) -> int:
    """Hash a run's seed, a step and a problem id to a 63-bit seed: the same on every machine and in any order."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
