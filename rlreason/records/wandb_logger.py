"""Weights & Biases as a second sink of the metrics. The run folder stays the record."""

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlreason.config.groups import LoggerConfig
from rlreason.config.packages import required
from rlreason.errors import ConfigError
from rlreason.runtime.environment import SWEEP_VARIABLE

COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip

#: Counter -> the metrics that are drawn over it. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": ("rollout/*", "reward/*", "grading/*", "ei/*", "time/*", "generations/rollouts"),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}
COUNTERS = ("rollout_step", "train_step", "eval_step")


def chosen(logger: LoggerConfig, folder: Path, own: Any) -> dict[str, Any]:
    """Arguments of `wandb.init`: what the user set, and our defaults where W&B has no value of its own.

    `own` are W&B's settings from its variables and files. What stands there is not passed, so it holds.
    """
    given = {field.name: getattr(logger, field.name) for field in fields(logger) if field.name != "kind"}
    defaults = {"project": "rlreason", "group": os.environ.get(SWEEP_VARIABLE), "name": folder.name}
    named = {"project": own.project, "group": own.run_group, "name": own.run_name}
    kept = {key: value for key, value in given.items() if value is not None}
    place = {} if "WANDB_DIR" in os.environ else {"dir": str(folder)}
    settings = {"silent": True} | ({"console": "off"} if own.console == "auto" else {})  # a run reports for itself
    return (
        place
        | {"settings": settings}
        | {key: value for key, value in defaults.items() if value and not named[key]}
        | kept
    )


def refuse_without_login(logger: LoggerConfig) -> None:
    """Before anything is loaded: W&B asked for online, and no login of it here. Nothing is sent anywhere.

    On a terminal W&B asks for one itself, when it starts.
    """
    try:
        import wandb

        own = wandb.setup().settings
        if (logger.mode or own.mode) != "online" or sys.stdin.isatty():
            return
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:  # said by the check for packages; in other versions only the start of a run tells
        return
    except Exception as error:  # a variable or a file of W&B's with nonsense in it
        raise _no_start(error) from error
    try:
        found = authenticate_session(host=own.base_url, source="rlreason", prompt=False, update_session=False)
    except TypeError:  # another version of this function
        return
    except Exception as error:  # a key that cannot be one
        raise _no_start(error) from error
    if found is None:
        raise _no_start("no login was found here")


def _no_start(why: object) -> ConfigError:
    reason = " ".join(str(why).split())
    return ConfigError(
        f"logger=wandb could not start ({reason}): run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline"
    )


class WandbLogger:
    """Sends every metrics row, with a step axis for every metric. `place`: where a person finds them; may be empty."""

    def __init__(self, folder: Path, logger: LoggerConfig, config: dict[str, Any]) -> None:
        with required("logger=wandb", "wandb"):
            import wandb
        try:
            own = wandb.setup().settings
            self.run = wandb.init(**chosen(logger, folder, own), config=config)
        except Exception as error:  # network, login and quota problems come as many kinds
            raise _no_start(error) from error
        self.place = _place(self.run)
        for counter in COUNTERS:
            self.run.define_metric(counter)
        for counter, names in AXES.items():
            for name in names:
                self.run.define_metric(name, step_metric=counter)
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def log(self, row: dict[str, float]) -> None:
        """One row, with every counter in it: the newest value of those that the row lacks."""
        self._counters |= {name: row[name] for name in COUNTERS if name in row}
        self.run.log(self._counters | row)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Responses to read of a step, at the counters of the latest row; `name` is `rollouts` or `evals`."""
        import wandb

        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self.run.log({f"generations/{name}": wandb.Table(["step", *COLUMNS], data), **self._counters})

    def abandon(self) -> None:
        """The run ended before anything was measured."""
        self.run.finish(exit_code=1)

    def finish(self, summary: dict[str, Any]) -> None:
        """The run came to an end of its own, or was interrupted."""
        self.run.summary.update(summary)
        self.run.finish()


def _place(run: Any) -> str:
    """Where a person finds a W&B run, as text; empty where it is switched off."""
    if run.disabled:
        return ""
    if run.settings.mode in ("offline", "dryrun"):
        folder = os.path.relpath(run.settings.sync_dir)
        return f"{folder}; to upload it: wandb sync FOLDER"
    return str(run.url or "")
