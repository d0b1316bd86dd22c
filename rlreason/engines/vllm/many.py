"""Use several vLLM engines as one: deal the prompts, load weights into all at once; a failure of one ends the call.

The random numbers of a response come from its prompt's seed alone, so the tokens are those of one engine.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.vllm.engine import CLOSING_S, VLLMEngine
from rlreason.errors import EngineError
from rlreason.model.policy import Policy
from rlreason.runtime.files import alive
from rlreason.types import Response

T = TypeVar("T")


class StoppedError(Exception):
    """Raised to stop the sampling of an engine when another has failed, or the caller was interrupted."""


class ManyEngines:
    """Start these engines side by side and use them as one; `names`: where each runs, for messages.

    All responses to a prompt come from one engine, which reads the prompt once.
    """

    def __init__(self, engines: Sequence[VLLMEngine], names: Sequence[str]) -> None:
        self.engines, self.names = list(engines), list(names)
        self._stopped = threading.Event()
        for engine in self.engines:
            engine.each_step = self._go_on
        try:
            self._on_all(lambda engine: engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def weight_version(self) -> int:
        """As in `engines.base.Engine`; the same for all engines."""
        return self.engines[0].weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        for engine in self.engines:
            engine.weight_version = version

    @property
    def drawn(self) -> int:
        """Tokens sampled by all engines since the last `generate` began."""
        return sum(engine.drawn for engine in self.engines)

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of each engine's start, for provenance."""
        return {name: engine.arguments for name, engine in zip(self.names, self.engines, strict=True)}

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Load these weights into every engine and check each; return the metrics of `merge_syncs`.

        `EngineError` names the engine that fails or does not have the weights.
        """
        return merge_syncs(self._on_all(lambda engine: engine.load_weights(policy)))

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; see `engines.base.Engine`. `finished` is called in the caller's thread.

        `EngineError` names the engine that fails; the others stop.
        """
        shares = deal(len(prompts), len(self.engines))
        events: SimpleQueue[EngineOutput] = SimpleQueue()

        def sample(k: int) -> None:
            ended: BaseException | None = None
            try:
                mine = [prompts[i] for i in shares[k]]
                self.engines[k].generate(mine, sampling, n, lambda place, response: events.put((k, place, response)))
            except BaseException as error:
                ended = error
            events.put((k, None, ended))

        under_way = {k for k, share in enumerate(shares) if share}
        for k, engine in enumerate(self.engines):
            engine.drawn = 0
            if k in under_way:
                threading.Thread(target=sample, args=(k,), name=f"sampling {self.names[k]}", daemon=True).start()
        responses: dict[int, Response] = {}
        try:
            while under_way:
                k, place, what = events.get()
                if place is None:
                    under_way.discard(k)
                    if what is not None:
                        raise self._named(k, what)
                    continue
                whole = shares[k][place // n] * n + place % n
                responses[whole] = what
                if finished is not None:
                    finished(whole, what)
        except BaseException:
            self._stopped.set()
            if _all_ended(events, under_way):
                self._stopped.clear()
            raise
        return [responses[place] for place in range(len(prompts) * n)]

    def close(self) -> None:
        """Close all side by side, also where one fails to close."""
        self._stopped.set()
        futures = [in_thread(engine.close, f"closing {name}") for engine, name in self._pairs()]
        wait(futures)
        for future in futures:
            future.result()

    def _pairs(self) -> list[tuple[VLLMEngine, str]]:
        return list(zip(self.engines, self.names, strict=True))

    def _on_all(self, call: Callable[[VLLMEngine], T]) -> list[T]:
        """Run `call` on each engine, in a thread each, and return the results.

        After a failure the others get no more time than closing may take.
        """
        futures = [in_thread(partial(call, engine), f"vLLM, {name}") for engine, name in self._pairs()]
        if wait(futures, return_when=FIRST_EXCEPTION).not_done:
            wait(futures, CLOSING_S)
        for k, future in enumerate(futures):
            if future.done() and (error := future.exception()) is not None:
                raise self._named(k, error)
        return [future.result() for future in futures]

    def _named(self, k: int, error: BaseException) -> BaseException:
        """Return an engine's failure with the name of the engine; a `ConfigError` unchanged."""
        if type(error) is not EngineError:
            return error
        named = EngineError(f"vLLM on {self.names[k]}: {error}")
        named.__cause__ = error
        return named

    def _go_on(self) -> None:
        alive()
        if self._stopped.is_set():
            raise StoppedError


def deal(prompts: int, engines: int) -> list[range]:
    """Deal the prompts' indices to the engines in turn, since neighbours often have similar lengths.

    >>> [list(share) for share in deal(5, 3)]
    [[0, 3], [1, 4], [2]]
    """
    return [range(k, prompts, engines) for k in range(engines)]


def merge_syncs(syncs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of one weight sync by several engines: the largest mismatch, the longest time, all tensors.

    >>> one = {"time/weight_sync": 1.0, "rollout/weight_check_mismatch": 1e-6, "rollout/weight_check_tensors": 20}
    >>> merge_syncs([one, one | {"time/weight_sync": 2.0}])["time/weight_sync"]
    2.0
    >>> merge_syncs([one, one])["rollout/weight_check_tensors"]
    40
    """
    return {
        name: sum(s[name] for s in syncs) if name.endswith("_tensors") else max(s[name] for s in syncs)
        for name in syncs[0]
    }


def in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """Run `call` in a daemon thread; return the future of its result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _all_ended(events: "SimpleQueue[EngineOutput]", under_way: set[int]) -> bool:
    """Wait for engines to stop sampling, at most as long as closing may take; return whether all have."""
    deadline = time.monotonic() + CLOSING_S
    while under_way and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(Empty):
            k, place, _ = events.get(timeout=left)
            if place is None:
                under_way.discard(k)
    return not under_way


EngineOutput = tuple[int, int | None, Any]  # (engine, index of a response among its own, the response); None: ended
