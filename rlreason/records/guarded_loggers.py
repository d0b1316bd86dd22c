"""All loggers of a run, each in a thread of its own, so that a failing or slow one never stops the run."""

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
from rlreason.records.loggers import (
    COLUMNS,
    COUNTERS,
    LIMIT_S,
    Logger,
    Row,
    Sent,
    SentRun,
    Table,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    sendable,
)
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import write_whole
from rlreason.runtime.text import redacted


@dataclass(frozen=True)
class Resumed:
    """What a resumed run will send again: the number of first rows, and these tables.

    The run folder is already cut back to the checkpoint.
    """

    rows_sent: int = 0
    tables_sent: frozenset[Table] = frozenset()


def catch_up_service(logger: Logger, rows: Sequence[Row], tables: Iterable[Table], resumed: Resumed) -> Sent:
    """Send recorded rows that the service has lost; return what it already has of the rows to come.

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


def recorded_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of the run folder as they were sent; null becomes nan."""
    found = RunFolder(folder).metrics
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in found]


def recorded_tables(folder: Path) -> Iterable[Table]:
    """Yield the tables of the responses in the run folder."""
    for kind in (ROLLOUTS, EVALS):
        yield from ((kind, file.step) for file in response_files(folder, kind) if file.step is not None)


def identities(folder: Path, chosen: Iterable[str], goes_on: bool) -> dict[str, str]:
    """Return logger -> the run's id in its service; written to the run folder before anything is sent.

    `goes_on`: a logger that the run had before keeps its id.
    """
    path = folder / LOGGERS
    known: dict[str, str] = {}
    if goes_on and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        known = {name: str(id) for name, id in found.items()} if isinstance(found, dict) else {}
    known |= {name: uuid4().hex[:12] for name in chosen if name not in known}
    write_whole(path, json.dumps(known, indent=1) + "\n")
    return known


SERVICES: dict[str, type[Logger]] = {"wandb": WandbLogger, "tensorboard": TensorBoardLogger, "trackio": TrackioLogger}
QUEUED = 1000  # calls that may wait for a slow logger
GIVEN_UP_S = 10.0  # a failed run waits this long for its loggers,
STOPPED_S = 20.0  # and an interrupted one this long
REASON_CHARS = 200


@dataclass
class LoggerCall:
    """A call of a logger. `fails`: the message where it fails; `last`: no call comes after it."""

    fails: str
    act: Callable[[], object]
    last: bool = False
    done: Event = field(default_factory=Event)


class GuardedLogger:
    """One logger in a thread; `failure` says why it has failed, if it has."""

    def __init__(self, name: str, cure: str) -> None:
        self.name, self.cure, self.failure, self.reported = name, cure, "", False
        self.logger: Logger | None = None
        self.sent = Sent()  # what the service already has of the calls to come
        self._calls: Queue[LoggerCall] = Queue(QUEUED)
        Thread(target=self._work, name=f"logger {name}", daemon=True).start()

    def put(self, fails: str, act: Callable[[Logger], object], last: bool = False) -> LoggerCall:
        """Queue a call of the logger."""
        return self._put(LoggerCall(fails, lambda: self.logger and act(self.logger), last))

    def start(self, make: Callable[[], Logger], until: float, catch_up: Callable[[Logger], Sent] | None = None) -> None:
        """Make the logger, let it catch up, and wait for it, up to a time on the monotonic clock."""

        def made() -> None:
            self.logger = logger = make()
            self.cure = logger.cure
            if catch_up is not None:
                self.sent = catch_up(logger)

        self.wait(self._put(LoggerCall("could not start", made)), until)

    def log(self, row: Row) -> LoggerCall:
        """Queue a row, without the metrics that the service already has."""

        def act(logger: Logger) -> None:
            if (left := self.sent.new_in(row)) is not None:
                logger.log(left)

        return self.put("failed", act)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> LoggerCall:
        """Queue a table, unless the service already has it."""

        def act(logger: Logger) -> None:
            if not self.sent.has_table(name, step):
                logger.table(name, step, rows, counters)

        return self.put("failed", act)

    def wait(self, call: LoggerCall, until: float) -> None:
        """Wait for a call, up to a time on the monotonic clock; a failed logger is not waited for again."""
        if not self.failure and not call.done.wait(max(until - time.monotonic(), 0.0)):
            self._fail(call.fails, "no answer in time")

    def _put(self, call: LoggerCall) -> LoggerCall:
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
                except BaseException as error:  # from the service's code, in our thread
                    if isinstance(error, ImportError):
                        self.cure = PACKAGES.get(self.name, ("", self.cure))[1]
                    self._fail(call.fails, reason(error))
            call.done.set()
            if self.failure and self.logger is not None:
                logger, self.logger = self.logger, None
                with suppress(BaseException):
                    logger.abandon()


def reason(error: BaseException) -> str:
    """Return an error's text in a line of at most `REASON_CHARS`, without W&B's advice on a time limit that is ours.

    >>> reason(ValueError("no key:\\n  log in")), reason(TimeoutError())
    ('no key: log in', 'TimeoutError')
    >>> reason(OSError("timed out Consider increasing the init_timeout setting")), reason(OSError("ab " * 100))[-9:]
    ('timed out', 'ab ab ...')
    """
    text = " ".join(str(error).split()).partition(" Consider increasing ")[0]
    if len(text) > REASON_CHARS:
        cut = text[: REASON_CHARS - 4]
        text = f"{cut.rpartition(' ')[0] or cut} ..."
    return text or type(error).__name__


class Loggers:
    """All loggers of a run; without any, every method does nothing.

    `say` reports a failed one; `limit_s`: how long the run waits for a start, and for the end.
    """

    def __init__(self, say: Callable[[str], object] = print, limit_s: float = LIMIT_S) -> None:
        self._say, self._limit_s, self._guarded = say, limit_s, list[GuardedLogger]()
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._ended = False

    def start(
        self, settings: LoggerConfig, folder: Path, config: Mapping[str, Any], resumed: Resumed | None = None
    ) -> None:
        """Start the chosen loggers one after the other, since their imports are not thread-safe.

        `resumed`: the run resumes from a checkpoint, and each logger resumes its run in the service.
        """
        if not settings.chosen:
            return
        known, catch_up, calls = identities(folder, settings.chosen, resumed is not None), None, 0
        if resumed is not None:
            rows, tables = [self._whole(row) for row in recorded_rows(folder)], list(recorded_tables(folder))
            catch_up = partial(catch_up_service, rows=rows, tables=tables, resumed=resumed)
            calls = len(rows) + len(tables) + resumed.rows_sent + len(resumed.tables_sent)
        shown = sendable(redacted(config))
        for name in settings.chosen:
            service, run = SERVICES[name], SentRun(known[name], resumed is not None, calls)
            self.add(name, partial(service, folder, settings, shown, run), service.cure, catch_up)

    def add(
        self, name: str, make: Callable[[], Logger], cure: str, catch_up: Callable[[Logger], Sent] | None = None
    ) -> None:
        """Start one. `cure`: what a user can do where that fails; `catch_up`: the first call in a resumed run."""
        guarded = GuardedLogger(name, cure)
        self._guarded.append(guarded)
        guarded.start(make, time.monotonic() + self._limit_s, catch_up)
        self._report()

    def log(self, row: dict[str, float]) -> None:
        """Log a row of metrics, completed by the latest counters."""
        whole = self._whole(row)
        for guarded in self._guarded:
            guarded.log(whole)
        self._report()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log responses of a step; `name` is `rollouts` or `evals`."""
        if not self._guarded:
            return
        counters, shown = dict(self._counters), [{name: sendable(row[name]) for name in COLUMNS} for row in rows]
        for guarded in self._guarded:
            guarded.table(name, step, shown, counters)
        self._report()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the loggers of a run that has ended by itself; after another end, do nothing."""
        shown, counters = sendable(summary), dict(self._counters)
        self._end("could not end in order", lambda logger: logger.finish(shown, counters), self._limit_s)

    def interrupted(self) -> None:
        """End the loggers of an interrupted run, as far as the time allows."""
        shown, counters, limit_s = {"status": "interrupted"}, dict(self._counters), min(STOPPED_S, self._limit_s)
        self._end("could not end in order", lambda logger: logger.finish(shown, counters), limit_s)

    def abandon(self) -> None:
        """End the loggers of a failed run; after another end, do nothing."""
        self._end("could not end in order", lambda logger: logger.abandon(), min(GIVEN_UP_S, self._limit_s))

    @property
    def failed(self) -> dict[str, str]:
        """The failures of the loggers that have failed, by name."""
        return {guarded.name: guarded.failure for guarded in self._guarded if guarded.failure}

    @property
    def places(self) -> dict[str, str]:
        """The run's place in each service, or the failure of the logger."""
        places = {g.name: g.failure or (g.logger.place if g.logger else "") for g in self._guarded}
        return {name: place for name, place in places.items() if place}

    def _whole(self, row: dict[str, float]) -> dict[str, float]:
        """Complete the row by the latest counters."""
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
            if guarded.failure and not guarded.reported:
                guarded.reported = True
                message = f"! logger={guarded.name} {guarded.failure}: {guarded.cure}"
                self._say(f"{message}; the run folder has everything")
