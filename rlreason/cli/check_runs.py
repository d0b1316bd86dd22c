"""Check the runs that a command line asks for: one, or every run of a sweep or of the sweeps of a chain."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import composed, composed_run, key_of
from rlreason.cli.design import design_of, file_of, fixed, folder_of, with_meant
from rlreason.cli.flags import Request
from rlreason.cli.launchers import GROUP, HERE, PROCESSES, chosen_launcher
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.names import translated
from rlreason.cli.options import keys_below, options_by_group
from rlreason.config.algorithms import DiscoverConfig
from rlreason.config.groups import OF_SWEEPS
from rlreason.config.rules import complaints, unread_keys
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import SweepFile
from rlreason.errors import ConfigError
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.sweeps.processes import GpuPlan, gpu_plan, machine_gpus
from rlreason.sweeps.state import Design, RunState, Setting, read_state

if TYPE_CHECKING:
    from rlreason.sweeps.carry import Carried

Note = Callable[[str], object]


def report_unread(request: Request, runs: Sequence[AnyRunConfig], others: Sequence[str], note: Note) -> None:
    """Refuse settings that none of the runs reads, and note those that only some of them read, except `others`."""
    said: dict[str, str] = {}  # setting that some run would not read -> the message about it
    never_read: dict[str, str] = {}  # the same for settings that no run would read
    for number, run in enumerate(runs):
        said |= {k: v for k, v in complaints(run).items() if k not in others}
        unread = {k: v for k, v in unread_keys(run).items() if k not in others}
        never_read = {key: where for key, where in unread.items() if not number or key in never_read}
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
    """Refuse a folder that cannot be made or written to."""
    try:
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        missing = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise PermissionError(f"{place} is no writable folder")
        for path in reversed(missing):  # try it: file systems have rules of their own
            path.mkdir()
        for path in missing:
            path.rmdir()
    except OSError as error:
        if exit_code(error) == RESOURCES:
            raise
        raise ConfigError(
            f"the run folder {folder} cannot be made: {error.strerror or error}: choose another"
        ) from None


# The runs of a sweep


def checked_sweep(request: Request, note: Note) -> Request:
    """Return the sweep with its folder, and with its design or, for a chain, its stages; `ConfigError` if a run could
    not begin. Hydra must be ready to compose.
    """
    base = composed(fixed(request.overrides), request.config_name)
    file = file_of(request.overrides)
    if file.chain:
        return _checked_chain(request, file, base, note)
    before = _carried(request.options.carry, note, base)
    design = design_of(request, note, _carried_overrides(before, note))
    if before:
        from rlreason.sweeps.carry import model_of, refuse_other_model

        first = composed(design.runs[0].overrides, request.config_name)  # unchecked: its model may be no folder here
        refuse_other_model(before, model_of(lambda key: OmegaConf.select(first, key)))
    return _checked(request, design, before, note)


def _checked(
    request: Request, design: Design, before: Sequence["Carried"], note: Note, later: Path | None = None
) -> Request:
    """Return the sweep with its design, its runs and the GPUs that they need; `ConfigError` if a run could not begin.

    `later`: a folder whose runs do not exist yet; those that begin from their models are only composed.
    """
    absent: list[str] | None = [] if request.options.dry else None
    runs, now = dict[str, AnyRunConfig](), list[RunState]()
    for run in design.runs:
        waits = later is not None and any(str(later) in word for word in run.overrides)
        runs[run.name] = composed_run(run.overrides, request.config_name, True, [] if waits else absent).run
        now += [] if waits else [run]
    checked = [runs[run.name] for run in now]
    report_unread(request, checked, [f"monitors.{monitor}" for monitor in OF_SWEEPS], note)
    if same := repeated_runs(checked, [run.overrides for run in now]):
        raise ConfigError("; ".join([*same[:3], *([f"and {len(same) - 3} more"] if same[3:] else [])]))
    if absent is None:
        check_start(checked, design.folder, note)
    else:
        _note_absent(absent, checked, design.folder, note)
    gpus = _gpus(request, list(runs.values()), note)
    carried = tuple(one.plain() for one in before)
    return replace(request, folder=design.folder, design=design, runs=runs, carried=carried, gpus=gpus)


def _note_absent(absent: Sequence[str], runs: Sequence[AnyRunConfig], folder: Path, note: Note) -> None:
    """Note what the runs of a plan would miss on this machine."""
    from rlreason.training.preflight import planned_warnings

    for line in dict.fromkeys([*absent, *planned_warnings([run for run in runs if works_on_a_model(run)], folder)]):
        note(f"! not here: {line}")
    note("note: the plan alone: data, lengths of prompts and functions of your own were not looked at")


def repeated_runs(runs: Sequence[AnyRunConfig], combinations: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each run with the same settings as an earlier one, though its overrides differ."""
    first: dict[str, set[str]] = {}
    lines = []
    for run, words in zip(runs, combinations, strict=True):
        own = set(words)
        before = first.setdefault(repr(run), own)
        if before is not own and before != own:
            one, other = (" ".join(sorted(these - those)) for these, those in ((before, own), (own, before)))
            lines.append(f"{one} and {other} make the same run: another setting decides over both: leave that one out")
    return list(dict.fromkeys(lines))


def stage_of(request: Request, stage: str, note: Note = print, started: bool = True) -> Request:
    """Return one sweep of a chain, with its design and every run checked; it writes to a folder below the chain's.

    `request`: the chain, from `check_command_line`. `started`: the stages before it have finished, and what they hand
    on is used; overrides and the stage's own settings take precedence. Hydra must be ready to compose
    (`composing(request)`). `ConfigError` if an earlier stage is incomplete, or a run of this one could not begin.
    """
    assert request.folder is not None
    earlier = request.chain[: request.chain.index(stage)] if started else ()
    handing = [name for name in earlier if file_of([f"sweep={name}"]).carries]
    before = _carried([str(folder) for name in handing if _compares(folder := request.folder / name, note)], note)
    own = request_of_stage(request, stage)
    with in_one_line(own.overrides, request.config_name):
        arms = _arms(own, request.folder, earlier, note)
        design = design_of(own, note, _carried_overrides(before, note), request.folder / stage, arms)
        return _checked(own, design, before, note, later=None if started else request.folder)


def _arms(request: Request, folder: Path, earlier: Sequence[str], note: Note) -> list[Setting]:
    """Return the settings that a stage takes from an earlier, broader one; [] if those were typed."""
    broad = file_of(request.overrides).best_of
    if broad not in earlier or not _compares(folder / broad, note):
        return []
    from rlreason.sweeps.carry import best_arms, setting_text

    arms = best_arms(folder / broad)
    if with_meant(map(key_of, request.overrides)) & arms[0].keys():
        return []
    best = "; ".join(map(setting_text, arms[1:])) or "none but the reference"
    note(f"note: {broad} hands on its best settings: {best}")
    return arms


def _gpus(request: Request, runs: Sequence[AnyRunConfig], note: Note) -> GpuPlan:
    """Return the GPUs for such runs; `ConfigError` if one of them needs more."""
    launcher, per_run = chosen_launcher(request.overrides), request.options.gpus_per_run
    here = launcher in HERE
    if here and launcher != PROCESSES:  # which lets every run see all GPUs
        if per_run:
            raise ConfigError(
                f"gpus_per_run={per_run}: {GROUP}={launcher} hands out no GPUs: leave it out, or leave {GROUP} out"
            )
        per_run = 0
    names = machine_gpus(os.environ, note) if here else []
    try:
        return gpu_plan(runs, names, per_run, here)
    except ConfigError as error:
        if not request.options.dry:
            raise
        note(f"! not here: {error}")
        return gpu_plan(runs, names, None, here=False)


def _compares(folder: Path, note: Note) -> bool:
    """Return whether a finished stage includes its reference setting; otherwise it hands nothing on."""
    if read_state(folder).reference is not None:
        return True
    note(f"note: {folder.name} hands nothing on: the setting that its file compares with was not among what was run")
    return False


def _checked_chain(request: Request, file: SweepFile, base: DictConfig, note: Note) -> Request:
    """Return the chain with its stages, each checked as it is when those before it hand nothing on."""
    if request.options.carry:
        raise ConfigError(
            f"carry={request.options.carry[0]} with sweep={file.name}: a chain carries by itself, from stage to stage: "
            "leave it out"
        )
    request = replace(request, chain=tuple(file.chain), folder=folder_of(request, [], base))
    said: dict[str, None] = {}
    stages = [stage_of(request, stage, lambda text: said.setdefault(str(text)), started=False) for stage in file.chain]
    for text in said:
        note(text)
    return replace(request, stages=tuple(stages))


def request_of_stage(request: Request, stage: str) -> Request:
    """Return the request for one sweep of a chain, without the settings that only other stages have."""
    given = {key_of(word) for word in request.overrides}
    axes = [f"{key}={value}" for key, value in file_of(request.overrides).axes.items() if key not in given]
    words = [word for word in request.overrides if key_of(word) not in ("sweep", "hydra.sweep.dir")]
    choices = [word for word in words if key_of(word) in options_by_group()]
    of_stage = {stage: _setting_names(stage, choices, request.config_name)}
    for word in [word for word in words if word not in choices and not word.startswith("hydra")]:
        if (key := key_of(word)) in of_stage[stage]:
            continue
        for other in request.chain:
            of_stage.setdefault(other, _setting_names(other, choices, request.config_name))
        if any(key in names for names in of_stage.values()):
            words.remove(word)
    overrides = [f"sweep={stage}", *words, *axes]
    return replace(request, overrides=overrides, options=replace(request.options, sweep_name=None), chain=())


def _setting_names(stage: str, choices: Sequence[str], name: str) -> set[str]:
    """Return the dotted keys that a sweep's runs have, including groups of settings."""
    cfg = composed([f"sweep={stage}", *fixed(list(choices))], name)
    return {key for key in keys_below(cfg) if not key.startswith("hydra")}


def _carried(sweeps: Sequence[str], note: Note, base: DictConfig | None = None) -> list["Carried"]:
    """Return what these sweeps hand on to one whose config, except its axes, is `base`; names as in `sweep_folder`."""
    if not sweeps:
        return []
    from rlreason.sweeps.carry import carry, model_of, sweep_folder  # slow to import

    def setting(key: str) -> Any:
        return OmegaConf.select(base, key) if base is not None else None

    found = [carry(sweep_folder(sweep, model_of(setting), str(setting("data.name")))) for sweep in sweeps]
    for one in found:
        note(f"note: {one.sentence}")
    return found


def _carried_overrides(before: Sequence["Carried"], note: Note) -> list[str]:
    """Return the overrides that earlier sweeps hand on; a later sweep takes precedence."""
    words = {key_of(word): word for one in before for word in translated(one.words, note)}
    return list(words.values())
