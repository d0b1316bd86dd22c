"""The interface of a rollout engine: `generate`, `load_weights`, `close`; and the records that go in."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlreason.types import Response

if TYPE_CHECKING:  # what asks for a Prompt or a Sampling need not load torch
    from rlreason.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to continue. `seed` alone decides the random numbers of its samples, whatever else is in the batch."""

    problem_id: str
    token_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The one home of the sampling numbers, used by engine and trainer. No top-k, top-p or penalty: the
    distribution sampled from is the one trained on."""

    temperature: float = 1.0  # 0 means greedy
    min_tokens: int = 0  # the first so many tokens neither are an end token nor hold the end of a stop string
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()  # kept in the text, as far as it is no special token; its tokens are kept whole
    tags: tuple[str, ...] = ()  # special tokens that stay in the text, because the task reads them
    end_ids: frozenset[int] = frozenset()  # tokens that end a response besides the model's own, such as a chat's turn


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a run asks of its engine: what an engine with a copy of the model plans its memory for."""

    longest: int  # tokens of the longest prompt with a full response
    rows: int  # responses that are asked for at once


Finished = Callable[[int, Response], None]


class Engine(Protocol):
    """Samples responses to prompts with the weights that it was given last."""

    weight_version: int  # counts weight syncs; stamped on every response

    @property
    def drawn(self) -> int:
        """Tokens since the newest `generate` began, for a person who waits; vLLM's are about so many."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, finished: Finished | None = None
    ) -> list[Response]:
        """n samples of each prompt, prompt by prompt in the given order.

        `finished(place, response)` is called as soon as a response has ended, with its place in the returned list, so
        that grading can go on during sampling.
        """
        ...

    def load_weights(self, policy: "Policy") -> dict[str, float]:
        """Sample from these weights from now on. Returns the sync's metrics: seconds, train-inference mismatch."""
        ...

    def close(self) -> None:
        """Stop what the engine has started and give its memory back. The engine is of no use afterwards."""
        ...


def seed_for(*parts: object) -> int:
    """A 63-bit seed from a run's seed, a step and a problem id: the same on every machine and in any order."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
