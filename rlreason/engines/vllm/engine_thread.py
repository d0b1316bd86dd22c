"""The thread that owns vLLM: whatever goes wrong in it becomes one error with the end of vLLM's log."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlreason.config.rollout import RolloutConfig
from rlreason.engines.vllm.installation import last_lines
from rlreason.engines.vllm.single_thread import SingleThread
from rlreason.errors import EngineError
from rlreason.runtime.stacks import NAME as STACKS
from rlreason.runtime.stacks import write_stacks

T = TypeVar("T")


class EngineThread(SingleThread):
    """After the first failure the engine counts as dead, and every later call says since when."""

    def __init__(self, rollout: RolloutConfig, log: Path, check_alive: Callable[[], None]) -> None:
        super().__init__("vllm", check_alive)
        self.rollout, self.log = rollout, log
        self.failure: str | None = None

    def call(self, function: Callable[[], T], limit_s: float = math.inf) -> T:
        """What `function` returns; `EngineError` where it raises, or takes longer than `limit_s` or the timeout."""
        if self.failure is not None:
            raise EngineError(f"rollout=vllm: the engine is dead since: {self.failure}")
        timeout_s = self.rollout.timeout_s
        try:
            return self.run(function, min(timeout_s, limit_s))
        except TimeoutError as error:
            limit = f"{limit_s:g} s" if limit_s < timeout_s else f"rollout.timeout_s={timeout_s:g}"
            stacks = write_stacks(self.log.with_name(STACKS), f"no answer of vLLM within {limit}")
            raise self.failed(f"no answer within {limit}: it hangs, or needs more{stacks}") from error
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def failed(self, reason: str) -> EngineError:
        """Note the failure; the error to raise."""
        self.failure = reason
        return EngineError(f"rollout=vllm failed: {reason}{last_lines(self.log)}")
