"""Check the runs that a command line asks for: one, or every run of a sweep or of the sweeps of a chain."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import composed, composed_run
from rlreason.cli.flags import Request
from rlreason.cli.mistakes import in_one_line, refuse_wrong_words
from rlreason.cli.names import translated
from rlreason.cli.options import config_content, config_exists, group_options, options_by_group
from rlreason.config.algorithms import DiscoverConfig
from rlreason.config.groups import OF_SWEEPS
from rlreason.config.rules import complaints, unread_keys
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import SweepFile, sweep_file
from rlreason.errors import ConfigError
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.sweeps.design import (
    design_of,
    file_at,
    fixed,
    folder_of,
    grid_of,
    key_of,
    named_sweep,
    with_meant,
)
from rlreason.sweeps.launcher import jobs_of
from rlreason.sweeps.state import RunState, SweepState, read_state

if TYPE_CHECKING:
    from rlreason.sweeps.carry import Carried

Note = Callable[[str], object]


def report_unread(request: Request, runs: Sequence[AnyRunConfig], others: Sequence[str], note: Note) -> None:
    """Refuse settings that none of the runs reads, and note those that only some of them read, except `others`."""
    said = {k: v for run in runs for k, v in complaints(run).items() if k not in others}
    unread = [{k: v for k, v in unread_keys(run).items() if k not in others} for run in runs]
    never_read = {key: where for key, where in unread[0].items() if all(key in keys for keys in unread)} if runs else {}
    useless = [line for key, line in said.items() if key in never_read]
    if useless and SWEEP_VARIABLE not in os.environ:  # in a run of a sweep, another run may read it
        raise ConfigError("\n".join(useless))
    for line in said.values():
        note(f"note: in some runs of this sweep, {line}")
    words = {word.partition("=")[0] for word in request.overrides}
    for key in sorted(words & never_read.keys() - said.keys()):  # set to their current value: harmless
        note(f"note: {key} has no effect: it is read {never_read[key]}")


def check_start(runs: Sequence[AnyRunConfig], folder: Path, note: Note) -> None:
    """Refuse runs that could not begin on this machine, or could not write to the folder."""
    check_writable(folder)
    from rlreason.discovery.loop import refuse_unready
    from rlreason.training.preflight import preflight

    for one in runs:
        if isinstance(one, DiscoverConfig):
            refuse_unready(one)
    for line in preflight([run for run in runs if works_on_a_model(run)], folder):
        note(f"note: {line}")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, by trying it: file systems have rules of their own."""
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        if exit_code(error) == RESOURCES:
            raise
        raise ConfigError(
            f"the run folder {folder} cannot be made: {error.strerror or error}: choose another"
        ) from None
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


# A sweep: its file and words -> its design -> every run composed and checked


def checked_sweep(request: Request, note: Note) -> Request:
    """Return the sweep with its folder, and with its design or, for a chain, its stages; `ConfigError` if a run could
    not begin. Hydra must be ready to compose.
    """
    file, carry = file_of(request.overrides), request.options.carry
    if not file.chain:
        return _checked(request, carry, note)
    if carry:
        raise ConfigError(f"carry={carry[0]}: the chain sweep={file.name} carries by itself: leave it out")
    base = composed(fixed(request.overrides), request.config_name)
    place = folder_of(request.overrides, [], base, request.options.sweep_name)
    request, said = replace(request, chain=tuple(file.chain), folder=place), dict[str, None]()
    stages = [stage_of(request, stage, lambda text: said.setdefault(str(text)), started=False) for stage in file.chain]
    for text in said:
        note(text)
    return replace(request, stages=tuple(stages))


def stage_of(request: Request, stage: str, note: Note = print, started: bool = True) -> Request:
    """Return one sweep of a chain, with its design and every run checked; it writes to a folder below the chain's.

    `started`: the stages before it have finished, and those whose reference has run hand on what they found, behind
    overrides and the stage's own settings. `ConfigError` if an earlier stage is incomplete, or a run could not begin.
    """
    assert request.folder is not None
    earlier = {one: request.folder / one for one in request.chain[: request.chain.index(stage)] if started}
    hand_on = {one: folder for one, folder in earlier.items() if read_state(folder).reference is not None}
    before = [str(folder) for one, folder in hand_on.items() if file_of([f"sweep={one}"]).carries]
    own, arms = request_of_stage(request, stage), list[list[str]]()
    with in_one_line(own.overrides, request.config_name):
        if (broad := file_of(own.overrides).best_of) in hand_on:
            from rlreason.sweeps.carry import best_arms

            arms = [translated([f"{k}={v}" for k, v in arm.items()], note) for arm in best_arms(hand_on[broad])]
            if with_meant(map(key_of, own.overrides)) & set(map(key_of, arms[0])):  # typed
                arms = []
            note(
                f"note: {broad} hands on its best settings: {'; '.join(map(' '.join, arms)) or 'none: some are typed'}"
            )
        return _checked(own, before, note, Stage(request.folder / stage, arms, waits=not started))


def request_of_stage(request: Request, stage: str) -> Request:
    """Return the request for one sweep of a chain, without the settings that only other stages have."""
    groups, given = options_by_group(), {key_of(word) for word in request.overrides}
    axes = [f"{key}={value}" for key, value in file_of(request.overrides).axes.items() if key not in given]
    words = [word for word in request.overrides if key_of(word) not in ("sweep", "hydra.sweep.dir")]
    choices = fixed([word for word in words if key_of(word) in groups])

    @cache
    def config(of: str) -> DictConfig:
        return composed([f"sweep={of}", *choices], request.config_name)

    def belongs(word: str) -> bool:
        key = key_of(word)
        if key in groups or word.startswith("hydra"):
            return True
        has = (OmegaConf.select(config(of), key, default=of) != of for of in (stage, *request.chain))
        return next(has) or not any(has)  # a setting of no stage is refused with the others

    overrides = [f"sweep={stage}", *filter(belongs, words), *axes]
    return replace(request, overrides=overrides, options=replace(request.options, sweep_name=None), chain=())


def file_of(overrides: Sequence[str]) -> SweepFile:
    """Return the file of the requested sweep, or an empty one. Hydra must be ready to compose."""

    def content(name: str) -> dict[str, Any]:
        if not config_exists(f"sweep/{name}"):
            known = ", ".join(group_options("sweep"))
            raise ConfigError(f"sweep={name} is no option of sweep: choose one of {known}")
        return config_content(f"sweep/{name}")

    return SweepFile("") if (name := named_sweep(overrides)) is None else sweep_file(name, content)


class Stage(NamedTuple):
    """What a sweep has from the chain that it is a stage of."""

    folder: Path  # where it writes
    arms: list[list[str]]  # settings that replace its own, the reference first
    waits: bool  # the stages before it have not run: what begins from their models is only composed


def designed(
    request: Request, note: Note = print, carried: Sequence[str] = (), stage: Stage | None = None
) -> tuple[SweepState, Path]:
    """Return the requested sweep, its runs not yet checked, and its folder. Hydra must be ready to compose.

    `carried`: overrides from finished sweeps, with lower precedence than typed ones and the sweep's own.
    """
    words, name = request.overrides, request.config_name
    base = composed(fixed(words), name)
    file = file_at(file_of(words), words, base, stage.arms if stage else ())
    axes = translated([f"{key}={value}" for key, value in file.axes.items()], note=str)  # a handout's names in a file
    refuse_wrong_words(axes)
    file = replace(file, axes=dict(word.split("=", 1) for word in axes))
    grid = grid_of(words, file, carried, note)
    place = stage.folder if stage else folder_of(words, grid.swept, base, request.options.sweep_name)
    return design_of(grid, file, place, lambda overrides: composed(overrides, name), str(base.seed)), place


def _checked(request: Request, before: Sequence[str], note: Note, stage: Stage | None = None) -> Request:
    """Return the sweep with its design, its runs and their launcher; `ConfigError` if a run could not begin.

    `before`: finished sweeps that hand on their winners.
    """
    carried = _carried(request, before, note)
    words = {key_of(word): word for one in carried for word in translated(one.words, note)}  # a later sweep wins
    design, folder = designed(request, note, list(words.values()), stage)
    if carried and stage is None:
        from rlreason.sweeps.carry import model_of, refuse_other_model

        first = composed(design.runs[0].overrides, request.config_name)  # unchecked: its model may be no folder here
        refuse_other_model(carried, model_of(lambda key: OmegaConf.select(first, key)))
    absent: list[str] | None = [] if request.options.dry else None
    runs, now = dict[str, AnyRunConfig](), list[RunState]()
    for run in design.runs:
        waits = stage is not None and stage.waits and str(folder.parent) in " ".join(run.overrides)
        runs[run.name] = composed_run(run.overrides, request.config_name, True, [] if waits else absent).run
        now += [] if waits else [run]
    checked = [runs[run.name] for run in now]
    report_unread(request, checked, [f"monitors.{monitor}" for monitor in OF_SWEEPS], note)
    refuse_repeated(checked, now)
    options = request.options
    jobs = jobs_of(request.overrides, list(runs.values()), options.jobs, options.gpus_per_run, note, absent)
    if absent is None:
        check_start(checked, folder, note)
    else:
        from rlreason.training.preflight import planned_warnings

        absent += planned_warnings([run for run in checked if works_on_a_model(run)], folder)
        for line in dict.fromkeys(absent):
            note(f"! not here: {line}")
        note("note: the plan alone: data, lengths of prompts and functions of your own were not looked at")
    design.carried, design.jobs, design.launcher = list(map(asdict, carried)), jobs.side_by_side, jobs.launcher
    return replace(request, folder=folder, design=design, runs=runs, jobs=jobs)


def _carried(request: Request, sweeps: Sequence[str], note: Note) -> list["Carried"]:
    """Return what these sweeps, names or folders, hand on to the requested one."""
    if not sweeps:
        return []
    from rlreason.sweeps.carry import carry, model_of, sweep_folder  # slow to import

    base = composed(fixed(request.overrides), request.config_name)
    model, data = model_of(lambda key: OmegaConf.select(base, key)), str(OmegaConf.select(base, "data.name"))
    found = [carry(sweep_folder(sweep, model, data)) for sweep in sweeps]
    for one in found:
        note(f"note: {one.sentence}")
    return found


def refuse_repeated(runs: Sequence[AnyRunConfig], planned: Sequence[RunState]) -> None:
    """Refuse a run with the same settings as an earlier one, though its overrides differ."""
    first: dict[str, set[str]] = {}
    for run, of_run in zip(runs, planned, strict=True):
        own = set(of_run.overrides)
        if (before := first.setdefault(repr(run), own)) != own:
            one, other = (" ".join(sorted(these - those)) for these, those in ((before, own), (own, before)))
            raise ConfigError(
                f"{one} and {other} make the same run: another setting decides over both: leave that one out"
            )
