"""Write a run folder: the one place that does, for training and for jobs that do not train."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.checkpoints import checkpoints_in, read_state, set_aside_behind
from rlreason.records.files import DAMAGED, finite, growing, line_of, opened, written
from rlreason.records.loggers.guarded import Loggers, Resumed
from rlreason.records.provenance import code_differs, differences, part_line, provenance
from rlreason.records.reader import RunFolder
from rlreason.records.resume import (
    cut_back,
    describe_place,
    discovery_goes_on,
    goes_on,
    refuse_other_run,
    reopened,
    where_it_goes_on,
)
from rlreason.records.rows import ResponseLog, Row, response_row, write_rows
from rlreason.records.status import how_it_ended, write_status
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import append_line, explained, write_whole
from rlreason.runtime.signals import held
from rlreason.runtime.streams import log_stderr_in, print_stderr
from rlreason.runtime.text import redacted
from rlreason.types import Problem, Sample

INPUTS = ("data", "prompts", "model", "tokenizer")  # in provenance.json: a run goes on with the same ones
ROWS_SENT = 32  # of a step's responses go to the loggers; the run folder has all of them


class RunWriter:
    """Writes one run folder. A finished run is never overwritten; what a broken-off one left is set aside.

    `words`: those of the command line that starts the run. `schemas`: which classes the settings are of
    (`config.store.schemas_of`). `sources`: setting -> source of each function of the user's own. `trains`: whether it
    is a training run, which goes on from a checkpoint; None: it goes on from nothing. An interrupted run with the same
    settings goes on, in which case `resumed` is true; with others it is refused. `say` prints what is set aside.
    `clock` says in each row where the time went.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        words: Sequence[str] = (),
        *,
        schemas: Mapping[str, str] | None = None,
        sources: Mapping[str, str] | None = None,
        trains: bool | None = None,
        say: Callable[[str], None] = print_stderr,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.checkpoint = None if not trains else where_it_goes_on(folder, config, say)  # to go on from
        conversation = trains is False and discovery_goes_on(folder, config)
        if self.checkpoint is None and not conversation:
            refuse_occupied(folder)
        if conversation and (folder / files.SUMMARY).exists():
            with explained(folder / files.SUMMARY):
                (folder / files.SUMMARY).rename(folder / "summary_before.json")
        self.folder = folder
        self.loggers = Loggers()  # set by the caller: they log in this folder, so they are made later
        folder.mkdir(parents=True, exist_ok=True)
        goes = self.checkpoint is not None or conversation
        self.resumed = goes or (trains is False and goes_on(folder, config))
        origin = provenance(schemas or {}, words) | ({"own_functions": list(sources)} if sources else {})
        if not self.resumed and (aside := set_aside(folder)):
            say(f"a broken-off run was here: its records are now in {aside}")
        functions = "\n\n".join(f"# {key}\n\n{redacted(text)}" for key, text in (sources or {}).items())
        if self.resumed:
            origin["earlier_parts"] = earlier_parts(folder, origin, say)
            say_other_functions(folder, functions, say)
        self._before, self.config, self._functions = how_it_ended(folder), config, functions
        write_status(folder, "running")
        log_stderr_in(folder)
        self._origin = origin
        self.train_step = 0.0  # of the newest row
        self.evaluated = False  # whether there is a row of an evaluation
        self.log: ResponseLog | None = None
        if self.checkpoint is None:
            self._describe()
            self.document(files.METRICS, "")

    def go_on(self, facts: Mapping[str, Any], say: Callable[[str], None]) -> Resumed:
        """Take the folder back to the checkpoint; returns what was recorded behind it, and is recorded again.

        `facts`: of the inputs as they are now (`setup.origin`). `ConfigError` where a run would go on with other data,
        prompts or another start model than before; then the folder is as it was.
        """
        assert self.checkpoint is not None
        parts = self._origin.get("earlier_parts", [])
        earlier: Mapping[str, Any] = next((part for part in reversed(parts) if "data" in part), {})
        if other := differences(earlier, facts, INPUTS):
            if self._before:  # else it was killed, and its status says as little as before
                write_status(self.folder, self._before["status"], self._before["reason"])
            raise ConfigError(
                f"hydra.run.dir={self.folder} holds a run that began with another input ({other[0]}): put back what it "
                "began with, or choose another folder"
            )
        reopened(self.folder, self.checkpoint)
        self._describe()
        set_aside_behind(self.checkpoint)
        state = read_state(self.checkpoint)
        cut = cut_back(self.folder, state)
        self.evaluated = True
        self.train_step = max((row.get("train_step", 0) for row in RunFolder(self.folder).metrics), default=0)
        again = f"; {cut.rows_sent} later rows are written again" * bool(cut.rows_sent)
        say(f"goes on    from {describe_place(state)} ({files.CHECKPOINTS}/{self.checkpoint.name}){again}")
        return cut

    def _describe(self) -> None:
        """What the run is made of."""
        self.add_provenance({})
        self.document(files.CONFIG, self.config)
        if self._functions:
            self.document(files.FUNCTIONS, self._functions)

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """Write down more of what the run is made of, beside what `provenance.json` tells already."""
        self._origin |= facts
        self.document(files.PROVENANCE, json.dumps(finite(self._origin), indent=2) + "\n")

    def offsets(self) -> dict[str, int]:
        """How long the files are, in bytes, that grow by a line at a time."""
        found = {}
        for name in files.GROWING:
            with suppress(FileNotFoundError):
                found[name] = (self.folder / name).stat().st_size
        return found

    @property
    def model(self) -> Path:
        """Where the run saves its model."""
        return self.folder / files.MODEL

    def metrics(self, row: dict[str, float]) -> None:
        """One flat row, every counter of `counters.py` in it, with what the clock has counted since the row before."""
        with self.clock.phase("record"):
            row = row | self.clock.row()
            with held():
                append_line(self.folder / files.METRICS, json.dumps(finite(row), allow_nan=False))
                self.train_step = row.get("train_step", 0)
                self.evaluated |= "eval/accuracy" in row
            self.loggers.log(row)

    def responses(
        self,
        kind: str,
        step: int,
        samples: Sequence[Sample],
        problems: Iterable[Problem],
        *,
        update: int | None = None,
        prompts: Sequence[str] = (),
    ) -> None:
        """Every response of a step with its grade: `rollouts/` from training, `evals/` from evaluation.

        `update`: the optimizer update, in an evaluation between two of them. `prompts`: the text that each was a
        response to, where it is to stand in the file; rollouts have it as token ids alone, for their size.
        """
        by_id = {p.id: p for p in problems}

        def row_of(place: int, s: Sample) -> Row:
            row = response_row(step, s, by_id[s.group]) | ({"prompt": prompts[place]} if prompts else {})
            if kind == files.ROLLOUTS and s.log_probs:  # what a loss on them divides by, where training scored them
                row["trainer_log_probs"] = [round(lp, 5) for lp in s.log_probs]
            return row

        with self.clock.phase("record"):
            path = self.folder / kind / files.step_name(step, update)
            path.parent.mkdir(exist_ok=True)
            write_rows(path, (row_of(place, s) for place, s in enumerate(samples)))
            self.loggers.table(kind, step, [finite(row_of(i, s)) for i, s in enumerate(samples[:ROWS_SENT])])

    def open_log(self, identity: str, problems: Sequence[Problem], n: int) -> ResponseLog:
        """The log of a job's responses as they end, with those that it goes on with; removed with the summary."""
        self.log = ResponseLog(self.folder, identity, problems, n)
        return self.log

    def rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A file of JSON lines, such as how often a job solved each problem."""
        with self.clock.phase("record"):
            write_rows(self.folder / name, rows)

    @contextmanager
    def growing(self, name: str) -> Iterator[Callable[[Iterable[Row]], None]]:
        """Yields a function that adds rows to a file which is there when the block ends, and not before."""
        shown = list[Row]()
        with growing(self.folder / name) as add:

            def written(rows: Iterable[Row]) -> None:
                with self.clock.phase("record"):
                    add(remembered(rows))

            def remembered(rows: Iterable[Row]) -> Iterator[Row]:
                for row in rows:
                    if len(shown) < ROWS_SENT:
                        shown.append(finite(row))
                    yield row

            yield written
        self.loggers.table(files.EVALS, 0, shown)

    def document(self, name: str, text: str) -> None:
        """A text for people, such as the objective's card."""
        write_whole(self.folder / name, text)

    def summary(self, summary: dict[str, Any]) -> None:
        """Written last: a folder with `summary.json` holds a run that came to an end of its own."""
        with held():
            write_status(self.folder, summary["status"], summary.get("reason", ""))
            failed = self._write_summary(summary)
            if self.log is not None:
                self.log.remove()
        self.loggers.finish(summary)
        if self.loggers.failed != failed:
            self._write_summary(summary)

    def _write_summary(self, summary: dict[str, Any]) -> dict[str, str]:
        """`summary.json`, with the loggers that have failed by now; returns these."""
        failed = self.loggers.failed
        whole = finite(summary | ({"failed_loggers": failed} if failed else {}))
        self.document(files.SUMMARY, json.dumps(whole, indent=2, allow_nan=False) + "\n")
        return failed


def earlier_parts(folder: Path, origin: Mapping[str, Any], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The provenance of each part of a run before the one of `origin`; other code is said."""
    earlier = RunFolder(folder).provenance
    parts = [*earlier.pop("earlier_parts", []), earlier | how_it_ended(folder)]
    for part in parts:
        say(f"before     {part_line(part)}")
    if not earlier.get("command"):
        say(f"! {files.PROVENANCE} of the part before cannot be read: whether code and data are the same is not known")
    elif differs := code_differs(earlier, origin):
        say(f"! {differs}: the numbers of this run come from both")
    return parts


def say_other_functions(folder: Path, functions: str, say: Callable[[str], None]) -> None:
    """Say where the source of a reward, data or loss of the user's own is another than that of the earlier part."""
    path = folder / files.FUNCTIONS
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if before != functions:
        say(f"! functions of your own have changed since this run began ({files.FUNCTIONS} has their sources now)")


def finish_provenance(folder: Path) -> None:
    """Add to `provenance.json` when and how the run ended, where its status tells."""
    path = folder / files.PROVENANCE
    if path.exists() and (told := how_it_ended(folder)):
        write_whole(path, json.dumps(RunFolder(folder).provenance | told, indent=2) + "\n")


def rewrite_rows(path: Path, rows: Mapping[int, Row]) -> None:
    """Replace lines of a file by these rows, by line number; every other line stays as it is, a broken one too.

    `ConfigError` where a compressed file is cut or altered.
    """
    try:
        with opened(path) as before, written(path) as after:
            for number, line in enumerate(before, 1):
                new = rows.get(number)
                after.write(line if new is None else line_of(new))
    except DAMAGED as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}): move it away, and the rest can be saved"
        ) from error


def refuse_taken(folder: Path, config: str, trains: bool) -> None:
    """`ConfigError` where a run with this config can neither begin in the folder nor go on there."""
    if trains and checkpoints_in(folder):
        refuse_other_run(folder, config)
    elif trains or not discovery_goes_on(folder, config):
        refuse_occupied(folder)
        if not trains:
            goes_on(folder, config)


def refuse_occupied(folder: Path) -> None:
    """Before anything is computed: a folder with a finished run, or with somebody else's files, keeps them."""
    if (folder / files.SUMMARY).exists():
        raise ConfigError(f"hydra.run.dir={folder} holds a finished run: choose another folder, or move that one away")
    found = [name for name in files.CONTENTS if (folder / name).exists()]
    if found and not (folder / files.PROVENANCE).exists():
        raise ConfigError(f"hydra.run.dir={folder} holds {found[0]}, which no run left there: choose another folder")


def set_aside(folder: Path) -> Path | None:
    """Move what a broken-off run left into `broken_off_1/` (2, 3 ...): its records are kept, and not mixed in."""
    found = [name for name in files.CONTENTS if (folder / name).exists()]
    if not found:
        return None
    number = 1
    while (aside := folder / f"{files.SET_ASIDE}{number}").exists():
        number += 1
    aside.mkdir()
    for name in found:
        os.replace(folder / name, aside / name)
    return aside
