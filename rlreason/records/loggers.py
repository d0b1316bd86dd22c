"""Send metrics to W&B, TensorBoard and Trackio as well as to the run folder; a logger that fails is dropped."""

import contextvars
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import LOGGERS, TENSORBOARD, Note, finite, read_json, write_json
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import redacted, shorten

Row = Mapping[str, float]
Summary = Mapping[str, Any] | None  # None: the run has failed

#: The columns of a response.
COLUMNS = (
    "step", "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome",
    "entropy", "length",
)  # fmt: skip

#: The metrics that are drawn over each counter. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": (
        "rollout/*", "reward/*", "grading/*", "ei/*", "time/*", "busy/*", "perf/*", "memory/*", "generations/rollouts",
    ),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}  # fmt: skip
COUNTERS = ("rollout_step", "train_step", "eval_step")

# Each of the three loggers is one run in one service. It starts from the run folder, all settings as nested dicts, and
# the run's id in the service, which has that run already where it `resumed`. `log` takes a row of metrics with every
# counter; `table` responses of a step, each with the values of `COLUMNS`, named `rollouts` or `evals`; `finish` ends
# the run, which has failed where there is no summary. Any of them may raise an exception; `Loggers` then drops the
# logger and prints its `cure`. `place`: the run's address, or the command that shows it; may be empty.


def axis_of(metric: str) -> str:
    """Return the counter over which a metric is drawn.

    >>> axis_of("reward/mean"), axis_of("eval/accuracy")
    ('rollout_step', 'train_step')
    """
    over_rollouts = any(fnmatchcase(metric, name) for name in AXES["rollout_step"])
    return "rollout_step" if over_rollouts else "train_step"


class WandbLogger:
    """A run in W&B, with a step axis for every metric. A setting wins over W&B's variables, these over our defaults."""

    cure = "run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline"

    place = ""

    def __init__(
        self, folder: Path, settings: LoggerConfig, config: dict[str, Any], id: str, resumed: bool = False
    ) -> None:
        import wandb
        from wandb.sdk.lib.wbauth import authenticate_session

        own = wandb.setup().settings.model_copy()
        own.update_from_env_vars(dict(os.environ))  # which W&B reads once in a process
        names: dict[str, Any] = {
            "project": settings.project or own.project or "rlreason",
            "group": settings.group or own.run_group or os.environ.get(SWEEP_VARIABLE),
            "name": settings.name or own.run_name or folder.name,
            "mode": settings.mode or own.mode,
            "entity": settings.entity,  # W&B itself reads its variables for these three
            "tags": settings.tags,
            "notes": settings.notes,
            "id": id,
            "resume": "allow" if resumed else None,
            "dir": os.environ.get("WANDB_DIR", str(folder)),
        }
        ours: dict[str, Any] = {
            "silent": True, "console": "off", "disable_git": True,
            "finish_timeout": 30.0, "finish_timeout_raises": True,  # seconds
            "reinit": "create_new",  # next to a run of the user's own in this process
            "x_disable_meta": redacted(sys.argv) != sys.argv,  # it has the command
        }  # fmt: skip
        online = names["mode"] == "online"
        if online and not authenticate_session(
            host=own.base_url, source="rlreason", prompt=False, update_session=False
        ):
            raise ValueError("no login was found here")  # for which W&B would prompt on a terminal and block the run
        self.run = wandb.init(**redacted(names), config=config, settings=ours)
        self._step = -1
        if not self.run.disabled:
            parts = Path(os.path.relpath(self.run.settings.sync_dir)).parent  # with a folder for each part of the run
            upload = f"to upload it: wandb sync {shlex.quote(str(parts))}/*-{id}"
            self.place = str(self.run.url or "") if online else f"offline; {upload}"
            self.cure = upload
        for counter in COUNTERS:
            self.run.define_metric(counter)
        for counter, metrics in AXES.items():
            for name in metrics:
                # as in the handout's snippet: evaluations are drawn over their number
                self.run.define_metric(name, step_metric="eval_step" if name == "eval/*" else counter)

    def log(self, row: Row) -> None:
        # W&B's own counter must rise, in every part of a resumed run too: 8 is for evaluations and tables of one step.
        self._step = max(self._step + 1, 8 * int(row["rollout_step"] + row["train_step"]))
        self.run.log(dict(row), step=self._step, commit=True)

    def table(self, name: str, rows: list[list[Any]], counters: Row) -> None:
        import wandb

        table: Any = wandb.Table(list(COLUMNS), rows)
        self.log({f"generations/{name}": table, **counters})

    def finish(self, summary: Summary) -> None:
        self.run.summary.update(dict(summary or {}))
        self.run.finish(exit_code=1 if summary is None else 0)


class TensorBoardLogger:
    """A run in TensorBoard: each metric over its counter; responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(
        self, folder: Path, settings: LoggerConfig, config: dict[str, Any], id: str, resumed: bool = False
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD))
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(folder / TENSORBOARD))}"
        if not resumed:
            self._text("config", as_yaml(config), 0)

    def log(self, row: Row) -> None:
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))
        self._writer.flush()  # else the last rows are lost with a killed process

    def table(self, name: str, rows: list[list[Any]], counters: Row) -> None:
        texts = ("\n".join(f"{column}: {v}" for column, v in zip(COLUMNS, row, strict=True)) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, "\n\n".join(texts), int(counters[axis_of(tag)]))

    def finish(self, summary: Summary) -> None:
        if summary is not None:
            self._text("summary", as_yaml(summary), 0)
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        """Log an unformatted text: TensorBoard reads Markdown, in which four spaces mark literal lines."""
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)
        self._writer.flush()


class TrackioLogger:
    """A run in Trackio: rows at the latest `train_step`; every row has all counters, so any can be the axis."""

    cure = "see that Trackio's folder (TRACKIO_DIR) can be written, or choose logger=none"

    def __init__(
        self, folder: Path, settings: LoggerConfig, config: dict[str, Any], id: str, resumed: bool = False
    ) -> None:
        import trackio

        names: dict[str, Any] = {
            "project": redacted(settings.project or "rlreason"),
            "name": redacted(settings.name or folder.name),
            "group": redacted(settings.group or os.environ.get(SWEEP_VARIABLE)),
        }
        names |= {"config": config, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(io.StringIO()):  # in a context of its own: a run of the user's own stays the current one
            self._run: Any = contextvars.Context().run(trackio.init, **names)
        self._run.id = id  # nothing was sent yet; Trackio itself would resume the newest run of this name
        self._step = 0
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        self.place = elsewhere or f"trackio show --project {shlex.quote(names['project'])}"

    def log(self, row: Row) -> None:
        self._step = int(row["train_step"])
        self._run.log(dict(row), step=self._step)

    def table(self, name: str, rows: list[list[Any]], counters: Row) -> None:
        import trackio

        table = trackio.Table(list(COLUMNS), rows)
        self._run.log({f"generations/{name}": table}, step=self._step)

    def finish(self, summary: Summary) -> None:
        import trackio

        if summary is not None:
            self._run.log({"summary": trackio.Markdown(f"```yaml\n{as_yaml(summary)}```")}, step=self._step)
        with redirect_stdout(io.StringIO()):
            self._run.finish()  # waits for at most 30 s


Logger = WandbLogger | TensorBoardLogger | TrackioLogger
SERVICES: dict[str, type[Logger]] = {"wandb": WandbLogger, "tensorboard": TensorBoardLogger, "trackio": TrackioLogger}


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return values as readable text."""
    return str(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))


class Loggers:
    """All loggers of a run; without any, every method does nothing. `say` prints the line of one that fails.

    `failed`: logger -> why it has failed. `places`: logger -> the run's place in the service, or why it has failed.
    """

    def __init__(self, say: Note = print) -> None:
        self._say, self._running = say, dict[str, Logger]()
        self.failed, self.places = dict[str, str](), dict[str, str]()
        self._newest: Row = dict.fromkeys(COUNTERS, 0)

    def start(self, settings: LoggerConfig, folder: Path, config: Mapping[str, Any], resumed: bool = False) -> None:
        """Start the chosen loggers. `resumed`: each continues its run."""
        path = folder / LOGGERS
        ids = {name: uuid4().hex[:12] for name in settings.chosen}
        ids |= read_json(path) if resumed and path.is_file() else {}
        write_json(path, ids, 1)
        plain = redacted(encodable(config))
        for name in settings.chosen:
            try:
                self._running[name] = SERVICES[name](folder, settings, plain, ids[name], resumed)
                self.places[name] = self._running[name].place
            except Exception as error:
                self._drop(name, "could not start", error, SERVICES[name].cure)

    def log(self, row: Row) -> None:
        """Log a row of metrics, which has every counter."""
        self._newest = row
        self._call("log", row)

    def table(self, kind: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log responses of a step; `kind` is `rollouts` or `evals`."""
        if self._running:
            values = encodable([[{"step": step, **row}[column] for column in COLUMNS] for row in rows])
            self._call("table", kind, values, {name: self._newest[name] for name in COUNTERS})

    def finish(self, summary: Summary) -> None:
        """End the loggers of a run; None: it has failed. After the first call, do nothing."""
        self._call("finish", encodable(summary))
        self._running.clear()

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of every logger; one that fails, whatever it raises, must not end the run."""
        for name, logger in list(self._running.items()):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                self._drop(name, "failed", error, logger.cure)

    def _drop(self, name: str, failure: str, error: Exception, cure: str) -> None:
        reason = shorten(str(error), 200) or type(error).__name__
        self._running.pop(name, None)
        self.failed[name] = self.places[name] = redacted(f"{failure} ({reason})")
        self._say(f"! logger={name} {self.failed[name]}: {cure}; the run folder has everything")


def encodable(value: Any) -> Any:
    r"""Return a value as JSON has it, with `?` for what UTF-8 cannot encode, such as a lone surrogate from a data file.

    >>> encodable({"question": "\ud800?", "entropy": float("nan")})
    {'question': '??', 'entropy': None}
    """
    return finite(json.loads(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")))
