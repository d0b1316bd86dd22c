"""Trackio: a dashboard of one's own, whose data lie in one place for all projects, beside the run folder."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.records.loggers.base import COLUMNS, Known, Row, Sent
from rlreason.records.loggers.silence import listen, silence
from rlreason.runtime.environment import SWEEP_VARIABLE
from rlreason.runtime.secrets import redacted

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
