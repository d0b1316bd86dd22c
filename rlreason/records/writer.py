"""Write a run folder, for training and for jobs that do not train: the only place that does."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.files import Note, line_of, opened, read_json, write_json, written
from rlreason.records.loggers import Loggers
from rlreason.records.provenance import differences, provenance
from rlreason.records.reader import RunFolder, read_ending, write_status
from rlreason.records.resume import checkpoint_to_resume, drop_behind, drop_later, resumes
from rlreason.records.rows import Row, response_row, write_rows
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import append_line, write_whole
from rlreason.runtime.signals import held
from rlreason.runtime.streams import log_stderr_in, print_stderr
from rlreason.runtime.text import redacted
from rlreason.types import Problem, Sample

INPUTS = ("data", "prompts", "model", "tokenizer")  # in provenance.json: must be the same when a run resumes
ROWS_SENT = 32  # responses of a step that the loggers get; the run folder has all of them


class RunWriter:
    """Write one run folder. A finished run is never overwritten; the files of a broken-off one are set aside.

    `words`: the command line that starts the run; `sources`: setting -> source of each function of the user's own.
    `trains`: whether it is a training run, which resumes from a checkpoint. An interrupted run with the same settings
    resumes (`resumed`); with others it is refused. `say` prints what is set aside. `clock` adds times to each row.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        words: Sequence[str] = (),
        sources: Mapping[str, str] | None = None,
        *,
        trains: bool = False,
        say: Note = print_stderr,
        clock: Clock | None = None,
    ) -> None:
        self.folder, self.config, self.clock = folder, config, clock or Clock()
        self.loggers = Loggers()  # replaced by the caller: they need this folder
        self.resumed = resumes(folder, config, trains)
        self.checkpoint = checkpoint_to_resume(folder, config, say) if trains and self.resumed else None
        if self.resumed and not trains and (folder / files.SUMMARY).exists():  # discovery with a larger budget
            (folder / files.SUMMARY).rename(folder / "summary_before.json")
        folder.mkdir(parents=True, exist_ok=True)
        sources = sources or {}
        self._provenance = provenance(words, sources)
        self._functions = "\n\n".join(f"# {key}\n\n{redacted(text)}" for key, text in sources.items())
        if self.resumed:
            earlier = RunFolder(folder).provenance
            parts = [*earlier.pop("earlier_parts", []), earlier | read_ending(folder)]
            for line in differences(earlier, self._provenance, ["code"]):
                say(f"! {line}: the numbers of this run come from both")
            self._provenance["earlier_parts"] = parts
            path = folder / files.FUNCTIONS
            if (path.read_text(encoding="utf-8") if path.exists() else "") != self._functions:
                say(f"! functions of your own have changed since this run began ({path.name} has their sources now)")
        elif names := [name for name in files.CONTENTS if (folder / name).exists()]:
            aside = next(place for n in count(1) if not (place := folder / f"{files.SET_ASIDE}{n}").exists())
            aside.mkdir()
            for name in names:
                os.replace(folder / name, aside / name)
            say(f"a broken-off run was here: its records are now in {aside}")
        write_status(folder, "running")
        log_stderr_in(folder)
        if self.checkpoint is None:
            self._describe()
            self.document(files.METRICS, "")

    def resume(self, facts: Mapping[str, Any], say: Note) -> None:
        """Take the folder back to the checkpoint.

        `facts`: of the current inputs (`training.build.run_facts`). `ConfigError` where data, prompts or the start
        model differ from before; then its records are unchanged.
        """
        assert self.checkpoint is not None
        parts = self._provenance.get("earlier_parts", [])
        earlier: Mapping[str, Any] = next((part for part in reversed(parts) if "data" in part), {})
        if other := differences(earlier, facts, INPUTS):
            raise ConfigError(
                f"hydra.run.dir={self.folder} holds a run that began with another input ({other[0]}): put back what it "
                "began with, or choose another folder"
            )
        state, summary = read_json(self.checkpoint / files.STATE), self.folder / files.SUMMARY
        if summary.exists():  # before any other change, so that the run can resume also if this start is killed
            summary.rename(self.folder / f"summary_of_{state['step']}_steps.json")
        self._describe()
        drop_behind(self.checkpoint)
        where = f"the end of step {state['step']} ({files.CHECKPOINTS}/{self.checkpoint.name})"
        say(f"goes on    from {where}; {drop_later(self.folder, state)} later rows are written again")

    def _describe(self) -> None:
        self.add_provenance({})
        self.document(files.CONFIG, self.config)
        if self._functions:
            self.document(files.FUNCTIONS, self._functions)

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """Add facts to `provenance.json`."""
        self._provenance |= facts
        write_json(self.folder / files.PROVENANCE, self._provenance)

    def lines(self) -> dict[str, int]:
        """Return how many lines the files have that grow by a line at a time."""
        growing = [self.folder / name for name in files.GROWING]
        return {path.name: path.read_bytes().count(b"\n") for path in growing if path.exists()}

    def metrics(self, row: dict[str, float]) -> None:
        """Append a flat row with every counter (`rows.Counters`), and the clock's times since the row before."""
        with self.clock.phase("record"):
            row = row | self.clock.row()
            append_line(self.folder / files.METRICS, line_of(row))
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
        """Write every response of a step with its grade: `rollouts/` from training, `evals/` from evaluation.

        `update`: the optimizer update, in the second evaluation of a step. `prompts`: the prompt of each, to be
        written too; rollouts have it only as token ids, for their size.
        """
        by_id, rows = {p.id: p for p in problems}, list[Row]()
        with self.clock.phase("record"):
            for place, s in enumerate(samples):
                row = response_row(step, s, by_id[s.group])
                if prompts:
                    row["prompt"] = prompts[place]
                if kind == files.ROLLOUTS and s.log_probs:  # the denominators of a loss, where training scored them
                    row["trainer_log_probs"] = [round(lp, 5) for lp in s.log_probs]
                rows.append(row)
            path = self.folder / kind / files.step_name(step, update)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rows(path, rows)
            self.loggers.table(kind, step, rows[:ROWS_SENT])

    @contextmanager
    def growing(self, name: str) -> Iterator[Callable[[Sequence[Row]], None]]:
        """Yield a function that adds rows to a file, which appears when the block ends; a failure leaves nothing.

        `UnwritableError` where the system refuses.
        """
        to_send = list[Row]()
        with written(self.folder / name) as file:

            def add(rows: Sequence[Row]) -> None:
                with self.clock.phase("record"):
                    file.writelines(map(line_of, rows))
                to_send.extend(rows[: ROWS_SENT - len(to_send)])

            yield add
        self.loggers.table(files.EVALS, 0, to_send)

    def document(self, name: str, text: str) -> None:
        """Write a text file, such as the objective's card."""
        write_whole(self.folder / name, text)

    def summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, last: a folder that has it is of a run that ended by itself."""
        with held():
            write_status(self.folder, summary["status"], summary.get("reason", ""))
            self._write_summary(summary)
            for log in (self.folder / files.UNFINISHED, *self.folder.glob(f"{files.EVALS}/*/{files.UNFINISHED}")):
                log.unlink(missing_ok=True)  # all that it holds is written
        self.loggers.finish(summary)
        if self.loggers.failed:
            self._write_summary(summary | {"failed_loggers": self.loggers.failed})

    def _write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.folder / files.SUMMARY, summary)


def finish_provenance(folder: Path) -> None:
    """Add to `provenance.json` when and how the run ended, where its status has it."""
    path = folder / files.PROVENANCE
    if path.exists() and (end := read_ending(folder)):
        write_json(path, RunFolder(folder).provenance | end)


def rewrite_rows(path: Path, rows: Mapping[int, Row]) -> None:
    """Replace lines of a file by these rows, by line number; every other line stays, a broken one too."""
    with opened(path) as before, written(path) as after:
        for number, line in enumerate(before, 1):
            after.write(line_of(rows[number]) if number in rows else line)
