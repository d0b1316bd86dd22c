"""Where the settings of `algorithm=discover` are read: a part of the table in `conditions.py`."""

from rlreason.config.discover import SIDE_BY_SIDE
from rlreason.config.uses import Condition

DISCOVER_CONDITIONS = (
    Condition(
        ("replies",),
        lambda run: run.strategy in SIDE_BY_SIDE,
        "by strategy=best_of_n and strategy=hybrid only",
    ),
    Condition(
        ("history", "restart_after", "prompts.error", "prompts.extend", "prompts.no_code"),
        lambda run: run.converses,
        "by strategy=refine and strategy=hybrid only",
    ),
)
