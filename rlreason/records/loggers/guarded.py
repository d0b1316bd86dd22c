"""The loggers of a run together, each in a thread of its own: whatever one does, the run goes on."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from rlreason.config.groups import LoggerConfig
from rlreason.config.leaves import PACKAGES
from rlreason.records.files import EVALS, LOGGERS, ROLLOUTS, response_files
from rlreason.records.loggers.base import COLUMNS, COUNTERS, LIMIT_S, Known, Logger, Row, Sent, Table, sendable
from rlreason.records.loggers.services import TensorBoardLogger, TrackioLogger, WandbLogger
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import write_whole
from rlreason.runtime.text import redacted


@dataclass(frozen=True)
class Resumed:
    """What will come again of what was sent: so many first rows, and these tables.

    The run folder is as it was at the checkpoint: `metrics.jsonl` is cut, later files of responses are gone.
    """

    rows_sent: int = 0
    tables_sent: frozenset[Table] = frozenset()


def caught_up(logger: Logger, rows: Sequence[Row], tables: Iterable[Table], resumed: Resumed) -> Sent:
    """Send what the service has lost of the rows that the run folder kept; returns what it holds of those to come.

    A lost table is not sent again: its responses are in the run folder.
    """
    sent = logger.sent()
    if sent is None:
        return Sent(tables=Counter(resumed.tables_sent), rows=resumed.rows_sent)
    for row in rows:
        if (left := sent.new_in(row)) is not None:
            logger.log(left)
    for name, step in tables:
        sent.has_table(name, step)
    return sent


def kept_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of the run folder as they were sent; what was not finite comes back as no number."""
    found = RunFolder(folder).metrics
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in found]


def kept_tables(folder: Path) -> Iterable[Table]:
    """The files of responses in the run folder."""
    for kind in (ROLLOUTS, EVALS):
        yield from ((kind, file.step) for file in response_files(folder, kind) if file.step is not None)


def identities(folder: Path, chosen: Iterable[str], goes_on: bool) -> dict[str, str]:
    """Logger -> the name that its service knows the run by. They stand in the run folder before anything is sent.

    `goes_on`: a logger that the run had before keeps its name.
    """
    path = folder / LOGGERS
    known: dict[str, str] = {}
    if goes_on and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        known = {name: str(told) for name, told in found.items()} if isinstance(found, dict) else {}
    known |= {name: uuid4().hex[:12] for name in chosen if name not in known}
    write_whole(path, json.dumps(known, indent=1) + "\n")
    return known


SERVICES: dict[str, type[Logger]] = {"wandb": WandbLogger, "tensorboard": TensorBoardLogger, "trackio": TrackioLogger}
QUEUED = 1000  # calls that may wait for a slow logger
GIVEN_UP_S = 10.0  # that a failed run waits for its loggers,
STOPPED_S = 20.0  # and one that was interrupted: somebody waits for it to end
REASON_CHARS = 200


@dataclass
class Call:
    """Something for a logger to do. `fails`: what is said of it where that fails; `last`: nothing comes after it."""

    fails: str
    act: Callable[[], object]
    last: bool = False
    done: Event = field(default_factory=Event)


class Guarded:
    """One logger, or what is left of it: `failure` says what became of one that failed."""

    def __init__(self, name: str, cure: str) -> None:
        self.name, self.cure, self.failure, self.said = name, cure, "", False
        self.logger: Logger | None = None
        self.sent = Sent()  # what comes and is there already
        self._calls: Queue[Call] = Queue(QUEUED)
        Thread(target=self._work, name=f"logger {name}", daemon=True).start()

    def put(self, fails: str, act: Callable[[Logger], object], last: bool = False) -> Call:
        """Have the logger do something, after what it was given before."""
        return self._put(Call(fails, lambda: self.logger and act(self.logger), last))

    def start(self, make: Callable[[], Logger], until: float, catch_up: Callable[[Logger], Sent] | None = None) -> None:
        """Make the logger, have it catch up, and wait for it, up to a time on the monotonic clock."""

        def made() -> None:
            self.logger = logger = make()
            self.cure = logger.cure
            if catch_up is not None:
                self.sent = catch_up(logger)

        self.wait(self._put(Call("could not start", made)), until)

    def log(self, row: Row) -> Call:
        """A row, without what is there already."""

        def act(logger: Logger) -> None:
            if (left := self.sent.new_in(row)) is not None:
                logger.log(left)

        return self.put("failed", act)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> Call:
        """A table that is not there already."""

        def act(logger: Logger) -> None:
            if not self.sent.has_table(name, step):
                logger.table(name, step, rows, counters)

        return self.put("failed", act)

    def wait(self, call: Call, until: float) -> None:
        """Wait for a call to be done, up to a time on the monotonic clock; one that failed is not waited for again."""
        if not self.failure and not call.done.wait(max(until - time.monotonic(), 0.0)):
            self._fail(call.fails, "no answer in time")

    def _put(self, call: Call) -> Call:
        try:
            if call.last or not self.failure:
                self._calls.put_nowait(call)
        except Full:
            self._fail(call.fails, "it does not keep up with the run")
            call.done.set()
        return call

    def _fail(self, what: str, why: str) -> None:
        self.failure = self.failure or redacted(f"{what} ({why})")

    def _work(self) -> None:
        last = False
        while not last:
            call = self._calls.get()
            last = call.last
            if not self.failure:
                try:
                    call.act()
                except BaseException as error:  # of others' code, in a thread of our own
                    if isinstance(error, ImportError):
                        self.cure = PACKAGES.get(self.name, ("", self.cure))[1]
                    self._fail(call.fails, reason(error))
            call.done.set()
            if self.failure and self.logger is not None:
                logger, self.logger = self.logger, None
                with suppress(BaseException):
                    logger.abandon()


def reason(error: BaseException) -> str:
    """What an error says, in a line of `REASON_CHARS` at most; without W&B's advice on its time limit, which is ours.

    >>> reason(ValueError("no key:\\n  log in")), reason(TimeoutError())
    ('no key: log in', 'TimeoutError')
    >>> reason(OSError("timed out Consider increasing the init_timeout setting")), reason(OSError("ab " * 100))[-9:]
    ('timed out', 'ab ab ...')
    """
    said = " ".join(str(error).split()).partition(" Consider increasing ")[0]
    if len(said) > REASON_CHARS:
        cut = said[: REASON_CHARS - 4]
        said = f"{cut.rpartition(' ')[0] or cut} ..."
    return said or type(error).__name__


class Loggers:
    """All loggers of a run; without any, every method does nothing.

    `say` prints what became of one that failed; `limit_s`: how long the run waits for a start, and for the end.
    """

    def __init__(self, say: Callable[[str], object] = print, limit_s: float = LIMIT_S) -> None:
        self._say, self._limit_s, self._guarded = say, limit_s, list[Guarded]()
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._ended = False

    def start(
        self, settings: LoggerConfig, folder: Path, config: Mapping[str, Any], resumed: Resumed | None = None
    ) -> None:
        """Start the chosen ones, one after the other: what they import is not made for two threads.

        `resumed`: the run goes on from a checkpoint, and each logger with its own run in the service.
        """
        if not settings.chosen:
            return
        known, catch_up, calls = identities(folder, settings.chosen, resumed is not None), None, 0
        if resumed is not None:
            rows, tables = [self._whole(row) for row in kept_rows(folder)], list(kept_tables(folder))
            catch_up = partial(caught_up, rows=rows, tables=tables, resumed=resumed)
            calls = len(rows) + len(tables) + resumed.rows_sent + len(resumed.tables_sent)
        shown = sendable(redacted(config))
        for name in settings.chosen:
            service, run = SERVICES[name], Known(known[name], resumed is not None, calls)
            self.add(name, partial(service, folder, settings, shown, run), service.cure, catch_up)

    def add(
        self, name: str, make: Callable[[], Logger], cure: str, catch_up: Callable[[Logger], Sent] | None = None
    ) -> None:
        """Start one. `cure`: what a user can do where that fails; `catch_up`: what it does first in a resumed run."""
        guarded = Guarded(name, cure)
        self._guarded.append(guarded)
        guarded.start(make, time.monotonic() + self._limit_s, catch_up)
        self._report()

    def log(self, row: dict[str, float]) -> None:
        """One row of metrics; it gets the newest value of the counters that it lacks."""
        whole = self._whole(row)
        for guarded in self._guarded:
            guarded.log(whole)
        self._report()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Responses of a step to read; `name` is `rollouts` or `evals`."""
        if not self._guarded:
            return
        counters, shown = dict(self._counters), [{name: sendable(row[name]) for name in COLUMNS} for row in rows]
        for guarded in self._guarded:
            guarded.table(name, step, shown, counters)
        self._report()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run came to an end of its own. A second end is none."""
        shown, counters = sendable(summary), dict(self._counters)
        self._end("could not end in order", lambda logger: logger.finish(shown, counters), self._limit_s)

    def interrupted(self) -> None:
        """The run was interrupted: what it has sent is finished as far as the time allows."""
        shown, counters, limit_s = {"status": "interrupted"}, dict(self._counters), min(STOPPED_S, self._limit_s)
        self._end("could not end in order", lambda logger: logger.finish(shown, counters), limit_s)

    def abandon(self) -> None:
        """The run failed; after another end, nothing."""
        self._end("could not end in order", lambda logger: logger.abandon(), min(GIVEN_UP_S, self._limit_s))

    @property
    def failed(self) -> dict[str, str]:
        """What became of those that failed, by their names."""
        return {guarded.name: guarded.failure for guarded in self._guarded if guarded.failure}

    @property
    def places(self) -> dict[str, str]:
        """Where a person finds the run in each service, as far as it can be found there; what became of the others."""
        places = {g.name: g.failure or (g.logger.place if g.logger else "") for g in self._guarded}
        return {name: place for name, place in places.items() if place}

    def _whole(self, row: dict[str, float]) -> dict[str, float]:
        """The row with the newest value of the counters that it lacks."""
        self._counters |= {name: row[name] for name in COUNTERS if name in row}
        return self._counters | row

    def _end(self, fails: str, act: Callable[[Logger], object], limit_s: float) -> None:
        if self._ended:
            return
        self._ended = True
        calls = [(guarded, guarded.put(fails, act, last=True)) for guarded in self._guarded]
        until = time.monotonic() + limit_s
        for guarded, call in calls:
            guarded.wait(call, until)
        self._report()

    def _report(self) -> None:
        for guarded in self._guarded:
            if guarded.failure and not guarded.said:
                guarded.said = True
                said = f"! logger={guarded.name} {guarded.failure}: {guarded.cure}"
                self._say(f"{said}; the run folder has everything")
