"""Whether runs could begin: their words compose, keep the rules and set what is read, and their folder is writable."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra import compose
from omegaconf import OmegaConf

from rlreason.cli.flags import Asked
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.multirun import composed
from rlreason.config.any_run import AnyRunConfig
from rlreason.config.discover import DiscoverConfig
from rlreason.config.monitors import OF_SWEEPS
from rlreason.config.rules import lowered
from rlreason.config.run import works_on_a_model
from rlreason.config.sources import resource_dir
from rlreason.config.store import typed
from rlreason.config.unread import complaints, unread_keys
from rlreason.errors import ConfigError
from rlreason.records.status import RESOURCES, exit_code
from rlreason.runtime.environment import SWEEP_VARIABLE


def place_of(overrides: Sequence[str], name: str, kind: str) -> Path:
    """The folder of a run (`kind` run) or of a drawn sweep (sweep). `ConfigError` where its setting names none."""
    plain = [w for w in overrides if kind == "run" or w.startswith(("sweep=", "hydra.", "hydra/"))]
    place = composed(plain, name).hydra[kind].dir
    if not place:
        raise ConfigError(f"hydra.{kind}.dir={place or ''} names no folder: give one, or leave it out")
    return Path(place)


def check_runs(
    asked: Asked, combinations: Sequence[Sequence[str]], folder: Path, note: Callable[[str], object]
) -> list[AnyRunConfig]:
    """Refuse runs that could not begin: their words, and the folder that they or their sweep will write to.

    Returns their settings.
    """
    name, multirun, in_sweep = asked.config_name, asked.multirun, SWEEP_VARIABLE in os.environ
    said: dict[str, str] = {}  # of each setting that some run would not read, what is to be said of it
    nobody: dict[str, str] = {}  # what none of them would read
    words = {word.partition("=")[0] for word in asked.overrides}
    of_sweeps = [f"monitors.{monitor}" for monitor in OF_SWEEPS] if multirun or in_sweep else []
    runs = []
    absent: list[str] | None = [] if asked.own.dry else None
    for number, combination in enumerate(combinations):
        run = checked(combination, name, multirun or in_sweep, absent)
        runs.append(run)
        said |= {k: v for k, v in complaints(run, resource_dir("conf")).items() if k not in of_sweeps}
        unread = {k: v for k, v in unread_keys(run).items() if k not in of_sweeps}
        nobody = {key: where for key, where in unread.items() if not number or key in nobody}
    useless = [line for key, line in said.items() if key in nobody]
    if useless and not in_sweep:  # of a sweep's own run, another one reads it
        raise ConfigError("\n".join(useless))
    for line in said.values():
        note(f"note: in some runs of this sweep, {line}")
    for key in sorted(words & nobody.keys() - said.keys()):  # given as they are anyway: no harm, but no effect either
        note(f"note: {key} has no effect: it is read {nobody[key]}")
    if same := the_same(runs, combinations):
        raise ConfigError("; ".join([*same[:3], *([f"and {len(same) - 3} more"] if same[3:] else [])]))
    if absent is None:
        _check_writable(folder)
    from rlreason.discovery.beginning import refuse_unready
    from rlreason.setup.preflight import preflight, seen_from_here  # it loads the grader: only where runs are to start

    for one in runs:
        if isinstance(one, DiscoverConfig):
            refuse_unready(one)
    if absent is not None:
        for line in dict.fromkeys([*absent, *seen_from_here([run for run in runs if works_on_a_model(run)], folder)]):
            note(f"! not here: {line}")
        note("note: the plan alone: data, lengths of prompts and functions of your own were not looked at")
        return runs
    for line in preflight([run for run in runs if works_on_a_model(run)], folder):
        note(f"note: {line}")
    return runs


def the_same(runs: Sequence[AnyRunConfig], combinations: Sequence[Sequence[str]]) -> list[str]:
    """A line for each run that has all settings of an earlier one, though its words differ."""
    first: dict[str, set[str]] = {}
    lines = []
    for run, words in zip(runs, combinations, strict=True):
        own = set(words)
        before = first.setdefault(repr(run), own)
        if before is not own and before != own:
            one, other = (" ".join(sorted(these - those)) for these, those in ((before, own), (own, before)))
            lines.append(f"{one} and {other} make the same run: another setting decides over both: leave that one out")
    return list(dict.fromkeys(lines))


def _check_writable(folder: Path) -> None:
    try:
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        missing = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise PermissionError(f"{place} is no writable folder")
        for path in reversed(missing):  # only trying tells, where the file system has rules of its own
            path.mkdir()
        for path in missing:
            path.rmdir()
    except OSError as error:
        if exit_code(error) == RESOURCES:
            raise
        raise ConfigError(
            f"the run folder {folder} cannot be made: {error.strerror or error}: choose another"
        ) from None


def checked(
    overrides: Sequence[str], name: str, of_sweep: bool = False, absent: list[str] | None = None
) -> AnyRunConfig:
    """The settings of one run, checked by its rules; `absent` as `typed` has it."""
    with in_one_line(overrides, name, composing=True):
        cfg = compose(name, list(overrides))
        OmegaConf.resolve(cfg)
    run = typed(cfg, of_sweep, absent)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    if "interim_eval_problems" in given and (bad := lowered(run)):
        raise ConfigError("\n".join(bad))
    return run
