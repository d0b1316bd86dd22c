"""A sweep that was asked for, made ready: its design, and every run of it checked before the first one starts."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import translated
from rlreason.cli.as_words import key_of
from rlreason.cli.check_runs import check_runs, place_of
from rlreason.cli.design import BASIC, design_of, file_of, folder_of
from rlreason.cli.flags import Asked
from rlreason.cli.grid import with_meant
from rlreason.cli.launchers import GROUP, HERE, RAY, chosen_launcher
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.multirun import composed, fixed, runs_of, with_own_names
from rlreason.cli.suggestions import options
from rlreason.config.any_run import AnyRunConfig
from rlreason.config.sweep_files import SweepFile
from rlreason.errors import ConfigError
from rlreason.sweeps.design import SWEEPS, Design, Setting
from rlreason.sweeps.gpus import GpuPlan, gpu_plan, machine_gpus
from rlreason.sweeps.state import read_state

if TYPE_CHECKING:
    from rlreason.sweeps.carry import Carried

MOST_RUNS_CHECKED = 200  # composing one run takes about 0.1 s
Note = Callable[[str], object]


def checked_sweep(asked: Asked, note: Note) -> Asked:
    """The sweep with its folder, and with its design or, of a chain, its stages. Hydra must be ready to compose.

    `ConfigError` where a run could not begin; of a drawn sweep, where one of the ends that it draws between could not.
    """
    base = composed(fixed(asked.overrides), asked.config_name)
    file = file_of(asked.overrides)
    if base.hydra.runtime.choices["hydra/sweeper"] != BASIC:
        return _checked_drawn(asked, file, note)
    if file.chain:
        return _checked_chain(asked, file, note)
    before = _carried(asked.own.carry, note, base)
    design = design_of(asked, note, _words_of(before, note))
    if before:
        from rlreason.sweeps.carry import model_of, refuse_other_model

        cfg = composed(design.runs[0].words, asked.config_name)
        refuse_other_model(before, model_of(lambda key: OmegaConf.select(cfg, key)))
    runs = check_runs(asked, shown_first(design), design.folder, note)
    gpus = _gpus(asked, runs, note)
    overrides = with_own_names(asked.overrides, asked.config_name, note)
    plain = tuple(one.plain() for one in before)
    return replace(asked, overrides=overrides, folder=design.folder, design=design, carried=plain, gpus=gpus)


def stage_of(
    asked: Asked, stage: str, note: Note = print, started: bool = True, most: int = MOST_RUNS_CHECKED
) -> Asked:
    """One sweep of a chain, with its design and every run checked; it writes to a folder below the chain's.

    `asked`: the chain, as `check_words` gave it. `started`: the stages before it have finished, and what they hand on
    is taken; what was typed and what the stage itself sets go before that. `most` of its runs are checked. Hydra must
    be ready to compose (`composing(asked)`). `ConfigError` where a stage before is not whole, or a run of this one
    could not begin.
    """
    assert asked.folder is not None
    earlier = asked.chain[: asked.chain.index(stage)] if started else ()
    handing = [name for name in earlier if file_of([f"sweep={name}"]).carries]
    before = _carried([str(folder) for name in handing if _compares(folder := asked.folder / name, note)], note)
    own = words_of_stage(asked, stage)
    with in_one_line(own.overrides, asked.config_name):
        arms = _arms(own, asked.folder, earlier, note)
        design = design_of(own, note, _words_of(before, note), asked.folder / stage, arms)
        runs = shown_first(design)
        if not started:  # a model that a stage before will leave is not there yet
            runs = [words for words in runs if not any(str(asked.folder) in word for word in words)]
        gpus = _gpus(asked, check_runs(own, runs[:most], design.folder, note), note)
    carried = tuple(one.plain() for one in before)
    return replace(own, folder=design.folder, design=design, carried=carried, gpus=gpus)


def _arms(asked: Asked, folder: Path, earlier: Sequence[str], note: Note) -> list[Setting]:
    """The settings that a stage takes from a broader one before it; none where those were typed."""
    broad = file_of(asked.overrides).best_of
    if broad not in earlier or not _compares(folder / broad, note):
        return []
    from rlreason.sweeps.carry import best_arms, in_words

    arms = best_arms(folder / broad)
    if with_meant(map(key_of, asked.overrides)) & arms[0].keys():
        return []
    note(f"note: {broad} hands on its best settings: {'; '.join(map(in_words, arms[1:])) or 'none but the reference'}")
    return arms


def _gpus(asked: Asked, runs: Sequence[AnyRunConfig], note: Note) -> GpuPlan:
    """The GPUs for such runs. `ConfigError` where there are fewer than one of them needs."""
    here = chosen_launcher(asked.overrides) in HERE
    names = machine_gpus(os.environ, note) if here else []
    try:
        return gpu_plan(runs, names, asked.own.gpus_per_run, here)
    except ConfigError as error:
        if not asked.own.dry:
            raise
        note(f"! not here: {error}")
        return gpu_plan(runs, names, None, here=False)


def _compares(folder: Path, note: Note) -> bool:
    """Whether a stage that has ended holds the setting that its others are compared with; else it hands nothing on."""
    if read_state(folder).reference is not None:
        return True
    note(f"note: {folder.name} hands nothing on: the setting that its file compares with was not among what was run")
    return False


def shown_first(design: Design) -> list[list[str]]:
    """The words of the runs to check: of all, or where they are very many of those that show each value first."""
    seen: set[tuple[str, str]] = set()
    first: list[list[str]] = []
    later: list[list[str]] = []
    for run in design.runs:
        new = {*run.setting.items(), ("seed", str(run.seed))} - seen
        seen |= new
        (first if new else later).append(list(run.words))
    return [*first, *later][:MOST_RUNS_CHECKED]


def _checked_chain(asked: Asked, file: SweepFile, note: Note) -> Asked:
    """The chain, each stage as it is when the ones before it hand nothing on."""
    if asked.own.carry:
        raise ConfigError(
            f"carry={asked.own.carry[0]} with sweep={file.name}: a chain carries by itself, from stage to stage: leave "
            "it out"
        )
    base = composed(fixed(asked.overrides), asked.config_name)
    asked = replace(asked, chain=tuple(file.chain), folder=folder_of(asked, [], base))
    said: dict[str, None] = {}
    for stage in file.chain:
        stage_of(asked, stage, lambda text: said.setdefault(str(text)), started=False)
    for text in said:
        note(text)
    return asked


def words_of_stage(asked: Asked, stage: str) -> Asked:
    """What was asked of a chain, asked of one of its sweeps: without the settings that only others of them have."""
    given = {key_of(word) for word in asked.overrides}
    axes = [f"{key}={value}" for key, value in file_of(asked.overrides).axes.items() if key not in given]
    words = [word for word in asked.overrides if key_of(word) not in ("sweep", "hydra.sweep.dir")]
    choices = [word for word in words if key_of(word) in options()]
    of_stage = {stage: _setting_names(stage, choices, asked.config_name)}
    for word in [word for word in words if word not in choices and not word.startswith("hydra")]:
        if (key := key_of(word)) in of_stage[stage]:
            continue
        for other in asked.chain:
            of_stage.setdefault(other, _setting_names(other, choices, asked.config_name))
        if any(key in names for names in of_stage.values()):
            words.remove(word)
    return replace(
        asked, overrides=[f"sweep={stage}", *words, *axes], own=replace(asked.own, sweep_name=None), chain=()
    )


def _setting_names(stage: str, choices: Sequence[str], name: str) -> set[str]:
    """The dotted keys that a sweep's runs have, groups of settings too."""
    cfg = OmegaConf.to_container(composed([f"sweep={stage}", *fixed(list(choices))], name))
    assert isinstance(cfg, dict)

    def keys(settings: dict[Any, Any], prefix: str = "") -> Iterator[str]:
        for key, value in settings.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")

    return set(keys({key: value for key, value in cfg.items() if key != "hydra"}))


def _carried(sweeps: Sequence[str], note: Note, base: DictConfig | None = None) -> list["Carried"]:
    """What these sweeps hand on, to one whose config, but for its axes, is `base`; see `sweep_folder` for names."""
    if not sweeps:
        return []
    from rlreason.sweeps.carry import carry, model_of, sweep_folder  # its statistics take a while to load

    def setting(key: str) -> Any:
        return OmegaConf.select(base, key) if base is not None else None

    found = [carry(sweep_folder(sweep, model_of(setting), str(setting("data.name")))) for sweep in sweeps]
    for one in found:
        note(f"note: {one.sentence}")
    return found


def _words_of(before: Sequence["Carried"], note: Note) -> list[str]:
    """The words that the sweeps before bring in; a later one decides over an earlier one."""
    words = {key_of(word): word for one in before for word in translated(one.words, note)}
    return list(words.values())


def _checked_drawn(asked: Asked, file: SweepFile, note: Note) -> Asked:
    """A sweep whose values a plug-in draws: there is no design, and of an axis both ends are checked."""
    plain = {"jobs": asked.own.jobs is not None, "dry": asked.own.dry, "carry": bool(asked.own.carry)}
    if unread := [word for word, given in plain.items() if given]:
        raise ConfigError(
            f"{unread[0]}= is for runs that are known beforehand, and hydra/sweeper draws them: leave one of them out"
        )
    if file.cells or file.embedded or file.chain:
        raise ConfigError(
            f"sweep={file.name} has cells, a block embedded or a chain, which no other sweeper knows: leave "
            "hydra/sweeper out, or give it axes of your own"
        )
    if (launcher := chosen_launcher(asked.overrides)) == RAY:
        raise ConfigError(
            f"{GROUP}={launcher} is for runs that are known beforehand, and hydra/sweeper draws them: leave it out"
        )
    overrides = with_own_names(asked.overrides, asked.config_name, note)
    if name := asked.own.sweep_name:
        overrides.append(f"hydra.sweep.dir='{SWEEPS / name}'")
    folder = place_of(overrides, asked.config_name, "sweep")
    runs = itertools.islice(runs_of(overrides, True, asked.config_name), MOST_RUNS_CHECKED)
    gpus = _gpus(asked, check_runs(asked, list(runs), folder, note), note)
    return replace(asked, overrides=overrides, folder=folder, gpus=gpus)
