"""Check a command line before Hydra acts on it: every run and every sweep that it requests."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import RESUME, algorithm_of, composed, composed_run, key_of, repeated, resumed_folder
from rlreason.cli.design import design_of, file_of, fixed, folder_of, with_meant
from rlreason.cli.flags import OneRun, Request, composing, read, split_sweep_options
from rlreason.cli.launchers import GROUP, HERE, PROCESSES, chosen_launcher
from rlreason.cli.mistakes import in_one_line, mistakes_in, refuse_wrong_words
from rlreason.cli.names import own_names, translated
from rlreason.cli.options import keys_below, options_by_group
from rlreason.config.algorithms import DiscoverConfig
from rlreason.config.groups import OF_SWEEPS
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import complaints, unread_keys
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import SweepFile
from rlreason.errors import ConfigError
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.sweeps.processes import GpuPlan, gpu_plan, machine_gpus
from rlreason.sweeps.state import Design, Setting, read_state

if TYPE_CHECKING:
    from rlreason.sweeps.carry import Carried

Note = Callable[[str], object]


def check_runs(request: Request, combinations: Sequence[Sequence[str]], folder: Path, note: Note) -> list[AnyRunConfig]:
    """Refuse runs of a sweep that could not begin, by their overrides or by the folder that the sweep would write to.

    Return their settings.
    """
    absent: list[str] | None = [] if request.options.dry else None
    runs = [composed_run(words, request.config_name, True, absent).run for words in combinations]
    report_unread(request, runs, [f"monitors.{monitor}" for monitor in OF_SWEEPS], note)
    if same := repeated_runs(runs, combinations):
        raise ConfigError("; ".join([*same[:3], *([f"and {len(same) - 3} more"] if same[3:] else [])]))
    if absent is None:
        check_start(runs, folder, note)
        return runs
    from rlreason.training.preflight import planned_warnings

    for line in dict.fromkeys([*absent, *planned_warnings([run for run in runs if works_on_a_model(run)], folder)]):
        note(f"! not here: {line}")
    note("note: the plan alone: data, lengths of prompts and functions of your own were not looked at")
    return runs


def report_unread(request: Request, runs: Sequence[AnyRunConfig], others: Sequence[str], note: Note) -> None:
    """Refuse settings that none of the runs reads, and note those that only some of them read, except `others`."""
    said: dict[str, str] = {}  # setting that some run would not read -> the message about it
    never_read: dict[str, str] = {}  # the same for settings that no run would read
    for number, run in enumerate(runs):
        said |= {k: v for k, v in complaints(run, resource_dir("conf")).items() if k not in others}
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


MOST_RUNS_CHECKED = 200  # composing one run takes about 0.1 s


def checked_sweep(request: Request, note: Note) -> Request:
    """Return the sweep with its folder, and with its design or, for a chain, its stages; `ConfigError` if a run could
    not begin. Hydra must be ready to compose.
    """
    base = composed(fixed(request.overrides), request.config_name)
    file = file_of(request.overrides)
    if file.chain:
        return _checked_chain(request, file, note)
    before = _carried(request.options.carry, note, base)
    design = design_of(request, note, _carried_overrides(before, note))
    if before:
        from rlreason.sweeps.carry import model_of, refuse_other_model

        cfg = composed(design.runs[0].overrides, request.config_name)
        refuse_other_model(before, model_of(lambda key: OmegaConf.select(cfg, key)))
    return _checked(request, design, runs_to_check(design), before, note)


def _checked(
    request: Request, design: Design, runs: Sequence[Sequence[str]], before: Sequence["Carried"], note: Note
) -> Request:
    """Return the sweep with its design, some of whose runs are checked now, and the GPUs that they need."""
    gpus = _gpus(request, check_runs(request, runs, design.folder, note), note)
    carried = tuple(one.plain() for one in before)
    return replace(request, folder=design.folder, design=design, carried=carried, gpus=gpus)


def stage_of(
    request: Request, stage: str, note: Note = print, started: bool = True, most: int = MOST_RUNS_CHECKED
) -> Request:
    """Return one sweep of a chain, with its design and every run checked; it writes to a folder below the chain's.

    `request`: the chain, from `check_command_line`. `started`: the stages before it have finished, and what they hand
    on is used; overrides and the stage's own settings take precedence. At most `most` of its runs are checked. Hydra
    must be ready to compose (`composing(request)`). `ConfigError` if an earlier stage is incomplete, or a run of this
    one could not begin.
    """
    assert request.folder is not None
    earlier = request.chain[: request.chain.index(stage)] if started else ()
    handing = [name for name in earlier if file_of([f"sweep={name}"]).carries]
    before = _carried([str(folder) for name in handing if _compares(folder := request.folder / name, note)], note)
    own = request_of_stage(request, stage)
    with in_one_line(own.overrides, request.config_name):
        arms = _arms(own, request.folder, earlier, note)
        design = design_of(own, note, _carried_overrides(before, note), request.folder / stage, arms)
        runs = runs_to_check(design)
        if not started:  # the model of an earlier stage does not exist yet
            runs = [words for words in runs if not any(str(request.folder) in word for word in words)]
        return _checked(own, design, runs[:most], before, note)


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


def runs_to_check(design: Design) -> list[list[str]]:
    """Return the overrides of the runs to check: all, or if there are very many, those that show each value first."""
    seen: set[tuple[str, str]] = set()
    first: list[list[str]] = []
    later: list[list[str]] = []
    for run in design.runs:
        new = {*run.setting.items(), ("seed", str(run.seed))} - seen
        seen |= new
        (first if new else later).append(list(run.overrides))
    return [*first, *later][:MOST_RUNS_CHECKED]


def _checked_chain(request: Request, file: SweepFile, note: Note) -> Request:
    """Check the chain, each stage as it is when the stages before it hand nothing on."""
    if request.options.carry:
        raise ConfigError(
            f"carry={request.options.carry[0]} with sweep={file.name}: a chain carries by itself, from stage to stage: "
            "leave it out"
        )
    base = composed(fixed(request.overrides), request.config_name)
    request = replace(request, chain=tuple(file.chain), folder=folder_of(request, [], base))
    said: dict[str, None] = {}
    for stage in file.chain:
        stage_of(request, stage, lambda text: said.setdefault(str(text)), started=False)
    for text in said:
        note(text)
    return request


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


def quoted(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Quote values that Hydra cannot read bare: with an equals sign, such as folders of sweeps, or letters such as ü.

    In a sweep a comma separates values, so a value that contains one is left alone.

    >>> quoted(["model.path=runs/sweeps/x/seed=0", "seed=0,1", "a='b=c'"], multirun=True)
    ["model.path='runs/sweeps/x/seed=0'", 'seed=0,1', "a='b=c'"]
    """

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        odd = "=" in value or not value.isascii()
        plain = not any(c in value for c in "'\"[]{}()\\" + "," * multirun)
        return f"{key}='{value}'" if odd and plain else word

    return [one(word) for word in overrides]


def check_command_line(words: Sequence[str], note: Note = print, design: bool = True) -> Request:
    """Check a command line before anything runs and return it under our names; `ConfigError` in one line for a mistake.

    A question must compose; runs must obey the rules and have a folder to write to. `design`: check the runs of a
    sweep too, which our sweeper does otherwise.
    """
    with mistakes_in(words):
        request = read(words)
        if not request.composes:
            return request
        with composing(request), in_one_line(request.overrides, request.config_name):
            if folder := resumed_folder(request.overrides, request.multirun):
                return _resumed(request, folder, note)
            request = prepared(request, note)
            if request.starts and request.multirun and not design:
                composed([*fixed(request.overrides), *request.options.overrides()], request.config_name)
            elif request.starts and request.multirun:
                request = checked_sweep(request, note)
            elif request.starts:
                request = replace(request, one=one_run(request, note))
            else:
                if request.multirun:  # the part that all runs of the sweep share
                    request = replace(request, overrides=fixed(request.overrides))
                part = request.flags.get("package", "_global_")
                if request.overrides or part != "_global_":
                    cfg = composed(request.overrides, request.config_name)
                    if part != "_global_" and OmegaConf.select(cfg, part) is None:
                        raise ConfigError(f"--package={part} is no part of the config: --cfg job shows it whole")
    return request


@contextmanager
def reading(words: Sequence[str], note: Note, algorithm: str = "") -> Iterator[Request]:
    """Yield the request of these words, prepared, with Hydra ready to compose it; a mistake is one line.

    `algorithm`: of the run whose settings are changed.
    """
    with mistakes_in(words):
        request = read(words)
        with composing(request), in_one_line(request.overrides, request.config_name):
            yield prepared(request, note, algorithm)


def prepared(request: Request, note: Note, algorithm: str = "") -> Request:
    """Return the request under our names, with the options of a sweep apart; every chosen option exists.

    `algorithm`: of the run whose settings are changed.
    """
    rest, sweep_options = split_sweep_options(request.overrides, request.multirun)
    words = quoted(own_names(rest, note, algorithm), request.multirun)
    request = replace(request, overrides=translated(words, note), options=sweep_options)
    refuse_wrong_words(request.overrides)
    return request


def one_run(request: Request, note: Note) -> OneRun:
    """Return the only run of a request, whose words are prepared; `ConfigError` if it could not begin."""
    in_sweep = SWEEP_VARIABLE in os.environ
    one = composed_run(request.overrides, request.config_name, of_sweep=in_sweep)
    if (sweep := one.of_hydra.hydra.runtime.choices.get("sweep")) and not in_sweep:
        raise ConfigError(f"sweep={sweep} is a grid of runs: add -m (python -m rlreason -m sweep={sweep})")
    report_unread(request, [one.run], [f"monitors.{monitor}" for monitor in OF_SWEEPS] if in_sweep else [], note)
    check_start([one.run], one.folder, note)
    return one


def _resumed(request: Request, folder: Path, note: Note) -> Request:
    """Return the request for a run that resumes in its folder, with the other words merged into its settings."""
    if "cfg" not in request.flags and not request.starts:
        raise ConfigError(f"{RESUME}={folder} has its settings from there: --cfg job shows them; leave other flags out")
    rest = [word for word in request.overrides if key_of(word) != RESUME]
    request = prepared(replace(request, overrides=rest), note, algorithm_of(folder))
    one = repeated(folder, request.overrides, note)
    if request.starts:
        check_start([one.run], folder, note)
    return replace(request, one=one)
