"""Waiting in tests: for a state, never for a time, and with a bound that a busy machine does not reach."""

import time
from collections.abc import Callable

from rlreason.config.groups import GradingConfig

MINUTES = 600.0  # seconds after which a wait has failed


def patient(**settings: object) -> GradingConfig:
    """Return a grader's settings with a limit that a busy machine does not reach; its default is 2 s."""
    return GradingConfig(**{"timeout_s": 60.0, "start_timeout_s": MINUTES, **settings})


def wait_for(condition: Callable[[], object], seconds: float = MINUTES, every: float = 0.02) -> None:
    """Ask for a condition until it holds; fail where it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"this did not come within {seconds:g} s"
        time.sleep(every)
