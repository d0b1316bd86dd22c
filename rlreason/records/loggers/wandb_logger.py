"""Weights & Biases: its own variables win over our defaults, the settings over both."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlreason.config.groups import LOGGERS, LoggerConfig
from rlreason.records.loggers.base import AXES, COLUMNS, COUNTERS, LIMIT_S, Known, Row, Sent
from rlreason.records.loggers.silence import listen, silence
from rlreason.runtime.environment import SWEEP_VARIABLE
from rlreason.runtime.secrets import redacted

HEADER = 7  # bytes of a file of W&B's that holds nothing
#: Seconds that W&B waits for its server at the start, and at the end: a little less than the run waits for W&B.
TIMEOUTS = {"init_timeout": LIMIT_S / 2, "finish_timeout": 0.75 * LIMIT_S}


def changed(wandb: Any) -> dict[str, Any]:
    """W&B's settings by those of its variables that are others now than when it read them, once in a process."""
    before, now = wandb.Settings(), wandb.Settings()
    before.update_from_env_vars(getattr(wandb.setup(), "_settings_environ", None) or os.environ)
    now.update_from_env_vars(os.environ)
    names = before.model_fields_set | now.model_fields_set
    return {name: getattr(now, name) for name in names if getattr(now, name) != getattr(before, name)}


def chosen(settings: LoggerConfig, folder: Path, own: Any, new: dict[str, Any], known: Known) -> dict[str, Any]:
    """Arguments of `wandb.init`: what the user set, and our defaults where W&B has no value of its own.

    `own` are W&B's settings from its variables and files. What stands there is not passed, so it holds, except for what
    is `new` there since W&B read them. Secrets in what names the run are hidden.
    """
    given = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in LOGGERS}
    defaults = {"project": "rlreason", "group": os.environ.get(SWEEP_VARIABLE), "name": folder.name}
    named = {"project": own.project, "group": own.run_group, "name": own.run_name}
    kept = {key: value for key, value in given.items() if value is not None}
    place = {} if "WANDB_DIR" in os.environ else {"dir": str(folder)}
    ours = new | {"silent": True, "finish_timeout_raises": True, "reinit": "create_new"}  # beside the user's own runs
    ours |= {"disable_git": True}  # it would keep the difference from a commit, with what is secret in it
    ours |= {"x_disable_meta": True} if redacted(sys.argv) != sys.argv else {}  # it would keep the command
    ours |= {"console": "off"} if own.console == "auto" else {}  # a run reports for itself
    ours |= {key: value for key, value in TIMEOUTS.items() if f"WANDB_{key.upper()}" not in os.environ}
    place |= {} if own.run_id else {"id": known.id}
    place |= {"resume": "allow"} if known.goes_on and not own.resume else {}
    told = {key: value for key, value in defaults.items() if value and not named[key]} | kept
    return place | {"settings": ours} | dict(redacted(told))


def refuse_without_login(settings: LoggerConfig, own: Any) -> None:
    """Without a login W&B would ask for one on a terminal, and hold the run."""
    if (settings.mode or own.mode) != "online":
        return
    from wandb.sdk.lib.wbauth import authenticate_session

    if authenticate_session(host=own.base_url, source="rlreason", prompt=False, update_session=False) is None:
        raise ValueError("no login was found here")


class WandbLogger:
    """A run of W&B's, with a step axis for every metric."""

    cure = "run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: Known) -> None:
        import wandb
        from wandb.errors import term

        silence(term, "_log")
        listen()
        new = changed(wandb)
        own = wandb.setup().settings.model_copy(update=new)
        refuse_without_login(settings, own)
        self.run = wandb.init(**chosen(settings, folder, own, new, known), config=config)
        self._new = self.run.disabled or not (
            earlier_parts(self.run) if is_offline(self.run) else self.run.starting_step
        )
        # W&B's own counter, where it does not know how far the run was
        self._step = known.calls if is_offline(self.run) and not self._new else None
        self._table = wandb.Table
        self.place, self.cure = found(self.run)
        for counter in COUNTERS:
            self.run.define_metric(counter)
        for counter, names in AXES.items():
            for name in names:
                # as the handout's snippet: an evaluation is drawn over its number
                self.run.define_metric(name, step_metric="eval_step" if name == "eval/*" else counter)

    def sent(self) -> Sent | None:
        """Nothing where W&B has nothing of the run; else it is trusted."""
        return Sent() if self._new else None

    def log(self, row: Row) -> None:
        """One row."""
        self._log(dict(row))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """The responses of a step as a table, at the counters of the newest row."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self._log({f"generations/{name}": self._table(["step", *COLUMNS], data), **counters})

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """The summary, and everything sent; `TimeoutError` where that takes too long."""
        self.run.summary.update(dict(summary))
        self.run.finish()
        if not self.run.disabled and not os.path.isdir(self.run.settings.sync_dir):
            raise FileNotFoundError(f"{self.run.settings.sync_dir} was removed")

    def abandon(self) -> None:
        """Ended as a failed run."""
        self.run.finish(exit_code=1)

    def _log(self, values: dict[str, Any]) -> None:
        if self._step is None:
            return self.run.log(values)
        self.run.log(values, step=self._step, commit=True)
        self._step += 1


def is_offline(run: Any) -> bool:
    """Whether nothing is sent to a server while the run goes on."""
    return run.settings.mode in ("offline", "dryrun")


def earlier_parts(run: Any) -> list[Path]:
    """W&B's folders of the parts of a run before this one, oldest first."""
    here = Path(run.settings.sync_dir)
    files = [file for file in here.parent.glob(f"*run-*-{run.id}/*.wandb") if file.stat().st_size > HEADER]
    folders = [file.parent for file in files if file.parent.name != here.name]
    return sorted(folders, key=lambda folder: folder.name.rpartition("run-")[2])


def found(run: Any) -> tuple[str, str]:
    """(where a person finds a W&B run, empty where it is switched off; what to do when it fails)."""
    if run.disabled:
        return "", "leave logger=wandb out"
    here = Path(run.settings.sync_dir)
    folders = [*earlier_parts(run), here] if is_offline(run) else [here]  # W&B puts the parts of one run together
    upload = f"wandb sync {' '.join(shlex.quote(os.path.relpath(folder)) for folder in folders)}"
    if is_offline(run):
        return f"offline; to upload it: {upload}", f"see that {run.settings.sync_dir} can be written"
    return str(run.url or ""), f"what was logged is on the disk; to upload it later: {upload}"
