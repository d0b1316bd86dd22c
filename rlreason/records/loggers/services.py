"""Weights & Biases, TensorBoard and Trackio, one logger each."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.groups import LOGGERS, LoggerConfig
from rlreason.records.files import TENSORBOARD
from rlreason.records.loggers.base import AXES, COLUMNS, COUNTERS, LIMIT_S, Known, Row, Sent, axis_of, listen, silence
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import redacted

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


FLUSHED_EVERY_S = 10
_TABLE = re.compile(r"generations/(\w+)/text_summary")  # the tag of a table
_STEP = re.compile(r"step: (\d+)")  # in its first line


class TensorBoardLogger:
    """Each metric over its counter, responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: Known) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / TENSORBOARD
        self._before = sorted(self._folder.glob("events.*")) if known.goes_on else []
        self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSHED_EVERY_S)
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(self._folder))}"
        if not self._before:
            self._text("config", yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 0)

    def sent(self) -> Sent:
        """What stands in the event files of the parts before; what was not yet written when one was killed does not."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        sent = Sent()
        for path in self._before:
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if kind := _TABLE.fullmatch(value.tag):
                        said = _STEP.search(value.tensor.string_val[0].decode("utf-8", "replace"))
                        sent.tables.update([(kind[1], int(said[1]))] if said else [])
                    else:
                        sent.metrics[value.tag, event.step] += 1
        return sent

    def log(self, row: Row) -> None:
        """Every metric at the step of its counter."""
        self._check()
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """The responses of a step as one text."""
        shown = "\n\n".join("\n".join(f"{column}: {row[column]}" for column in COLUMNS) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, f"step: {step}\n\n{shown}", int(counters[axis_of(tag)]))
        self._writer.flush()  # or what was shown may be lost with the process

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """The summary as text, and everything to the disk."""
        self._text("summary", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True), int(counters["train_step"]))
        self.abandon()

    def abandon(self) -> None:
        """Everything to the disk."""
        self._writer.close()

    def _check(self) -> None:
        """The folder holds its file: TensorBoard would fail in a thread of its own, with a traceback."""
        if not any(self._folder.iterdir()):
            raise FileNotFoundError(f"{self._folder} was emptied")

    def _text(self, tag: str, text: str, step: int) -> None:
        """A text as it is: TensorBoard reads Markdown, in which four spaces keep a line from being read."""
        self._check()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)


OWN = {"step", "timestamp"}  # columns of its store
WARNS = "_emit_nonfatal_warning"  # what Trackio says through it, it goes on after


def names(settings: LoggerConfig, folder: Path) -> dict[str, Any]:
    """What names the run in Trackio, without secrets: "project", "name" and "group", which may be None."""
    named = {
        "project": settings.project or "rlreason",
        "name": settings.name or folder.name,
        "group": settings.group or os.environ.get(SWEEP_VARIABLE),
    }
    return dict(redacted(named))


class TrackioLogger:
    """Every row at the newest `train_step`; any counter can be chosen as the axis, since every row has them all."""

    cure = "see that Trackio's folder (TRACKIO_DIR) can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: Known) -> None:
        import trackio
        from trackio import run, utils

        for module in (trackio, run, utils):
            silence(module, "print")
            silence(module, WARNS)
        self._heard = listen()  # in this thread, whose current run, kept in a context variable, is nobody else's either
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        named = names(settings, folder)
        self._local, self._table, self._text = not elsewhere, trackio.Table, trackio.Markdown
        callers = trackio.config  # of a run of the user's own, which the module shows
        self._run = trackio.init(
            **named,
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        trackio.config = callers
        self._run.id = known.id  # nothing was sent yet; Trackio's own way to go on takes the newest run of this name
        self._store = vars(trackio)["SQLiteStorage"]
        self._heard.clear()  # it started
        self._lost = dict[str, str]()  # what the run warns of, in threads of Trackio's too
        vars(self._run)["_warn_once"] = self._lost.setdefault
        self.place = elsewhere or f"trackio show --project {shlex.quote(named['project'])}"

    def sent(self) -> Sent | None:
        """What stands in Trackio's store on this computer; None where the run is kept elsewhere."""
        if not self._local:
            return None
        sent, run = Sent(), self._run
        if run.id not in [record["id"] for record in self._store.get_run_records(run.project)]:
            return sent
        for row in self._store.get_logs(run.project, run.name, run_id=run.id):
            tables = {name: value for name, value in row.items() if name.startswith("generations/")}
            sent.add({name: value for name, value in row.items() if name not in tables.keys() | OWN})
            for name, value in tables.items():
                sent.tables[name.partition("/")[2], int(value["_value"][0]["step"])] += 1
        return sent

    def log(self, row: Row) -> None:
        """One row; what Trackio could not keep of those before is an error here."""
        self._run.log(dict(row), step=int(row["train_step"]))
        if self._local:
            self._check()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """The responses of a step as a table."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self._run.log({f"generations/{name}": self._table(["step", *COLUMNS], data)}, step=int(counters["train_step"]))

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """The summary as text, and everything to its place."""
        text = yaml.safe_dump(summary, sort_keys=False, allow_unicode=True)
        self._run.log({"summary": self._text(f"```yaml\n{text}```")}, step=int(counters["train_step"]))
        self.abandon()
        self._check()

    def abandon(self) -> None:
        """Everything to its place."""
        self._run.finish()

    def _check(self) -> None:
        """Trackio warns of what it could not write or send, and goes on."""
        if lost := [*self._lost.values(), *(text for name, text in self._heard if name == WARNS)]:
            raise OSError(lost[0])
