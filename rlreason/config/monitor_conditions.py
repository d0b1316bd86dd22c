"""Where the settings of `monitors` are read: a part of the table in `conditions.py`, which says what it is for."""

from collections.abc import Callable
from typing import Any

from rlreason.config.monitors import MODES, OF_JOBS, OF_SWEEPS, limits_of
from rlreason.config.uses import Condition


def _is_on(monitor: str) -> Callable[[Any], bool]:
    return lambda run: getattr(run.monitors, monitor) != "off"


MONITOR_CONDITIONS = (
    Condition(
        tuple(
            f"monitors.{key}"
            for name in MODES
            if name not in (*OF_JOBS, *OF_SWEEPS)
            for key in (name, *limits_of(name))
        ),
        lambda run: run.trains,
        "by algorithms that train only",
    ),
    Condition(
        tuple(f"monitors.{name}" for name in OF_SWEEPS),
        lambda run: False,
        "by a sweep only, which stops a setting that another one surely beats",
        "start a sweep with -m, or leave it out",
    ),
    *(
        Condition(
            tuple(f"monitors.{key}" for key in limits_of(name)),
            _is_on(name),
            f"where monitors.{name} is not off only",
            f"set monitors.{name}=warn, or leave it out",
        )
        for name in MODES
        if limits_of(name)
    ),
)
