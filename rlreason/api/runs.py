"""Read what a run left in its folder as plain Python values."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlreason.cli.ls import LAST, RUNS, newest
from rlreason.config.leaves import flat
from rlreason.errors import ConfigError
from rlreason.records.files import RESPONSES, ROLLOUTS, UNFINISHED, ResponseFile, sets_of
from rlreason.records.reader import RunFolder
from rlreason.report.compare import entry
from rlreason.report.read import read_study
from rlreason.report.study import Study
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.streams import print_stderr

if TYPE_CHECKING:
    from pandas import DataFrame

Rows = list[dict[str, Any]]


class Run:
    """A run's folder. Each property reads the files when it is used, also while the run is in progress.

    Lists hold one flat dict per row, ready for `pandas.DataFrame`. What the run did not leave is None or [].
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Raise `ConfigError` if the folder is not that of a run."""
        if not isinstance(folder, str | PathLike):
            raise ConfigError(f"{folder!r:.60} is no folder: give the folder of a run, as printed at its start")
        self.folder = Path(folder).absolute()  # wherever the program goes
        self._print_once = cache(print_stderr)
        _ = self._reader().settings

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        return f"Run('{self.folder}': {self.status}{accuracy})"

    def _reader(self) -> RunFolder:
        return RunFolder(self.folder, self._print_once)

    @property
    def status(self) -> str | None:
        """Return its status: finished, diverged:RULE, interrupted, failed, running ..."""
        return self._reader().status

    @property
    def config(self) -> dict[str, Any]:
        """Return every setting with its value, groups as nested dicts."""
        return self._reader().settings

    @property
    def summary(self) -> dict[str, Any]:
        """Return `summary.json`; {} if the run did not reach an end of its own."""
        return self._reader().summary or {}

    @property
    def accuracy(self) -> float | None:
        """Return that of the last evaluation, over all its problems; None for an unfinished run."""
        return self.summary.get("accuracy")

    @property
    def model(self) -> Path | None:
        """Return the folder of the saved model, which `transformers` loads; None if there is none."""
        return self._reader().model

    @property
    def metrics(self) -> Rows:
        """Return the rows of `metrics.jsonl`: one for each optimizer update and evaluation, under their full names."""
        return self._reader().metrics

    @property
    def evaluations(self) -> Rows:
        """Return a row for each evaluation: the step, the updates so far, and its numbers (accuracy ...)."""
        rows = [row for row in self.metrics if "eval/accuracy" in row]
        return [
            {"step": row.get("rollout_step"), "train_step": row.get("train_step")}
            | {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith(("eval/", "final/"))}
            for row in rows
        ]

    @property
    def responses(self) -> Rows:
        """Return every saved response with its question, ground truth and grade; `kind` is "training" or "evaluation".

        `set`: of `eval.sets`; "" of the run's own.

        A long run has many: keep the list, or choose files with the subcommand `inspect`.
        """
        reader = self._reader()
        by_job = [path for name in (RESPONSES, UNFINISHED) if (path := self.folder / name).is_file()][:1]
        own = [*reader.rollouts(), *reader.evaluations(), *(ResponseFile(path, RESPONSES) for path in by_job)]
        saved = [("", file) for file in own]
        saved += [(name, file) for name in sets_of(self.folder) for file in reader.evaluations(name)]
        return [
            {"kind": "training" if file.kind == ROLLOUTS else "evaluation", "update": file.update, "set": name}
            | flat(row)
            for name, file in saved
            for row in reader.rows(file, ()).values()
        ]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs that a sweep had when it was loaded, as pandas frames."""

    study: Study

    def frame(self) -> "DataFrame":
        """Return a row for each optimizer update and evaluation so far: the varied settings, seed, step and metrics."""
        from pandas import DataFrame

        rows = [
            {name: run.settings.get(name, value) for name, value in one.key} | {"seed": run.seed} | row
            for one, run in self.study.each
            for row in RunFolder(run.folder, print_stderr).metrics
        ]
        return DataFrame(rows).rename(columns={"rollout_step": "step"})

    def verdicts(self) -> "DataFrame":
        """Return a row for each comparison with the reference: difference, interval, seeds, p and verdict."""
        from pandas import DataFrame

        return DataFrame([entry(verdict) for verdict in verdicts_of(self.study)])


def load_sweep(folder: str | PathLike[str]) -> Sweep:
    """Return the runs of a sweep, finished or not, or of "last"; `ConfigError` if the folder holds none."""
    if find_spec("pandas") is None:
        raise ConfigError("load_sweep needs pandas: pip install 'rlreason[report]'")
    return Sweep(read_study([newest(RUNS, single=False) if folder == LAST else Path(folder)]))


def load_run(folder: str | PathLike[str]) -> Run:
    """Return the run in a folder, also one of the command line, or "last"; `ConfigError` if it holds none."""
    return Run(newest(RUNS, single=True) if folder == LAST else folder)
