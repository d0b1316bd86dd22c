"""Read what a run left in its folder as plain Python values."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import translated
from rlreason.cli.check import check_command_line, quoted
from rlreason.cli.command import run_job
from rlreason.cli.flags import Request, composing, own_hydra, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.resume import evaluation_overrides, expand_resume, key_of, overrides_of, remember
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import RESPONSES, ROLLOUTS, UNFINISHED, ResponseFile
from rlreason.records.reader import RunFolder, refuse_unbegun
from rlreason.runtime.machine import SWEEP_VARIABLE, divide_memory_finely, place_of, process_state_kept
from rlreason.runtime.plugins import as_settings
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import redacted

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
        self._messages = set[str]()
        reader = self._reader()
        refuse_unbegun(self.folder)
        _ = reader.config

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        return f"Run('{self.folder}': {self.status}{accuracy})"

    def _reader(self) -> RunFolder:
        return RunFolder(self.folder, self._print_once)

    def _print_once(self, text: str) -> None:
        if text not in self._messages:
            self._messages.add(text)
            print_stderr(text)

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

        A long run has many: keep the list, or choose files with the subcommand `inspect`.
        """
        reader = self._reader()
        names = (RESPONSES, UNFINISHED)
        by_job = [ResponseFile(path, RESPONSES) for name in names if (path := self.folder / name).is_file()][:1]
        return [
            {"kind": "training" if file.kind == ROLLOUTS else "evaluation", "update": file.update} | _flat(row)
            for file in [*reader.rollouts(), *reader.evaluations(), *by_job]
            for row in reader.rows(file, ()).values()
        ]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose nested dicts are columns.

    >>> _flat({"step": 1, "facts": {"level": "3"}})
    {'step': 1, 'facts.level': '3'}
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def load_run(folder: str | PathLike[str]) -> Run:
    """Return the run in a folder, also one started from the command line; `ConfigError` if it holds none."""
    return Run(folder)


#: The settings of Hydra that do not change the whole process: where a run writes, and where options are found.
HYDRA_SETTINGS = ("hydra.run.dir", "hydra.job.name", "hydra.searchpath")
_running = threading.Lock()  # held by the one run of this process


def _overrides_to_evaluate(run: Run, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that evaluate the run's model as the run did, except for what these overrides choose."""
    if run.model is None:
        raise ConfigError(f"{run.folder} holds no saved model: give a run of save_model=true, or model.path=FOLDER")
    with composing(read([])), mistakes_in(overrides):
        chosen = translated(quoted(overrides, multirun=False), note=lambda _: None)
        config, problems = run.config, run.summary.get("eval_problems")
        if problems and config.get("eval_problems"):  # a scale's number may exceed those there were
            config["eval_problems"] = min(problems, config["eval_problems"])
        return evaluation_overrides(config, str(run.model.absolute()), chosen)


def settings(overrides: Sequence[object]) -> DictConfig:
    """Return what the overrides compose to; see `rlreason.compose`."""
    with own_hydra():
        request = check_command_line(["--cfg=job", *expand_resume(_checked_overrides(overrides)).words], note=print)
        with composing(request):
            return _composed(request)


def start(
    first: Sequence[str] | Run,
    overrides: Sequence[object],
    config: DictConfig | RunConfig | None,
    objects: dict[str, Any],
    quiet: bool,
) -> Run:
    """Start the run of `first` and then `overrides`, or evaluate the run `first`; return it when it has ended.

    `objects`: the reward, loss and data that were given as Python objects; see `rlreason.train`.
    """
    if place_of():
        raise ConfigError(
            "torchrun has started this script several times: run it once, and say gpus=2, which starts the other ranks"
        )
    texts = _checked_overrides(overrides)
    with ExitStack() as stack:
        stack.enter_context(_alone())
        own = stack.enter_context(as_settings(**objects))
        _refuse_twice(own, texts)
        out = stack.enter_context(open(os.devnull, "w")) if quiet else None
        console = Console(out)
        with own_hydra():
            if isinstance(first, Run):
                if (first.config.get("eval") or {}).get("prompt"):  # keep that prompt
                    own = [word.replace("prompt.reward=", "eval.reward=", 1) for word in own]
                first = _overrides_to_evaluate(first, [*own, *texts])
            resumed = expand_resume([*_config_overrides(config, own), *first, *own, *texts])
            stack.enter_context(_sweep_variable(resumed.sweep))
            for line in resumed.notes:
                console.say(f"note: {line}")
            request = check_command_line(resumed.words, note=console.say)
            with composing(request):
                cfg = _composed(request)
            run = typed(cfg, of_sweep=resumed.sweep is not None)
            if not works_on_a_model(run):
                raise ConfigError(f"algorithm={run.algorithm} is started by python -m rlreason: leave it out here")
            folder = _folder_of(request)
        stack.enter_context(process_state_kept())
        divide_memory_finely()
        run_job(run, folder, redacted(OmegaConf.to_yaml(cfg)), request.arguments(), console)
    return Run(folder)


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second run while one is in progress: a run sets the state of the whole process."""
    if not _running.acquire(blocking=False):
        raise ConfigError(
            "another run of this process is under way: wait until it has ended, or start one by python -m rlreason"
        )
    try:
        yield
    finally:
        _running.release()


@contextmanager
def _sweep_variable(name: str | None) -> Iterator[None]:
    """Make a run in this block one of the sweep `name`; None: leave the variable as it is."""
    before = os.environ.get(SWEEP_VARIABLE)
    if name is not None:
        os.environ[SWEEP_VARIABLE] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop(SWEEP_VARIABLE, None)
            os.environ.update({} if before is None else {SWEEP_VARIABLE: before})


def _refuse_twice(own: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise `ConfigError` if an override also sets what was given as an argument: one of them would have no effect.

    >>> _refuse_twice(["loss=python:f-1"], ["loss.tau=0.5"])
    """
    for override in overrides:
        for argument in own:
            if key_of(override) == key_of(argument) and "=" in override:
                name = key_of(argument).rpartition(".")[2]
                raise ConfigError(f"{name}= is given twice, as an argument and as {override}: leave one of them out")


def _config_overrides(config: DictConfig | RunConfig | None, own: Sequence[str]) -> list[str]:
    """Return the overrides that compose to `config`, without those that `own` sets."""
    if config is None:
        return []
    if not isinstance(config, DictConfig | RunConfig):
        kind = type(config).__name__
        raise ConfigError(f"config= is of type {kind}: give what rlreason.compose(...) returned, and words as texts")
    with composing(read([])):
        return overrides_of(config, own)


def _composed(request: Request) -> DictConfig:
    """Return the config of checked overrides without Hydra's part, with every value resolved."""
    with mistakes_in(request.overrides), in_one_line(request.overrides, composing=True):
        cfg = hydra_compose(request.config_name, list(request.overrides))
        OmegaConf.resolve(cfg)
    remember(cfg, request.overrides)
    return cfg


def _folder_of(request: Request) -> Path:
    """Return the run's folder.

    A default name with the time gets a number if another run began in the same second.
    """
    assert request.folder is not None
    folder = request.folder.absolute()
    if not any(word.startswith("hydra.run.dir=") for word in request.overrides):
        numbered = (folder.with_name(f"{folder.name}_{n}") for n in range(2, 10**6))
        while folder.exists():
            folder = next(numbered)
    return folder


def _checked_overrides(overrides: Sequence[object]) -> list[str]:
    """Return the overrides as they are; `ConfigError` unless they request one run in this process."""
    parser, texts = OverridesParser.create(), list[str]()
    for word in overrides:
        if not isinstance(word, str):
            raise ConfigError(f"{word!r} is no override: write it as a text, 'key=value'")
        if word.startswith("-"):
            raise ConfigError(
                f"{word} is a flag of the command line: leave it out here; several runs are a loop of Python's, and "
                "options of your own are found by 'hydra.searchpath=[FOLDER]'"
            )
        texts.append(word)
        key = word.lstrip("+~").partition("=")[0]
        if key.startswith("hydra") and key not in HYDRA_SETTINGS:
            raise ConfigError(f"{word} would change the whole process: leave it out, or start it by python -m rlreason")
        try:
            [override] = parser.parse_overrides(quoted([word], multirun=False))
        except HydraException:  # reported when it is checked
            continue
        if override.is_sweep_override() or (key == "sweep" and override.value() is not None):
            raise ConfigError(
                f"{word} asks for several runs, and this starts one: write a loop of Python's, or start the sweep by "
                "python -m rlreason -m"
            )
    return texts
