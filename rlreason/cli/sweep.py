"""A sweep: its file and words become a design, every run is composed and checked, and a launcher runs what is left.

overrides  ->  CheckedSweep: its design and its runs, each of them checked  ->  plan  ->  what is left of its runs
           ->  jobs of a launcher, whose runs write their folders          ->  sweep.json and the table
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import check_start, composed, composed_alike, composed_run, refuse_unread
from rlreason.cli.flags import Request, keys_below, options_by_group, sources
from rlreason.cli.mistakes import refuse_wrong_words
from rlreason.cli.names import translated
from rlreason.cli.subcommands import parser_of
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import SweepFile, sweep_file
from rlreason.errors import ConfigError
from rlreason.records.console import Console, run_lines
from rlreason.runtime import signals
from rlreason.runtime.files import run_lock
from rlreason.runtime.looks import looks_of
from rlreason.runtime.text import aligned, first_line, redacted
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
from rlreason.sweeps.launcher import JOBLIB, Jobs, jobs_of, launched
from rlreason.sweeps.state import (
    RunState,
    SweepState,
    begun,
    read_state,
    refuse_changed,
    setting_text,
    write_state,
)
from rlreason.sweeps.texts import closing, plan_text

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Grid
    from rlreason.report.carry import Carried

Note = Callable[[str], object]
say = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class CheckedSweep:
    """A sweep that may start, or a stage of a chain."""

    overrides: Sequence[str]
    folder: Path  # where it writes
    design: SweepState
    runs: Mapping[str, AnyRunConfig]  # by name
    jobs: Jobs  # how a launcher runs them


def checked_sweep(request: Request, note: Note) -> list[CheckedSweep]:
    """Return the sweep, or for a chain its stages as they are before the first has run; `ConfigError` if a run could
    not begin. Hydra must be ready to compose.
    """
    file, base = file_of(request.overrides), shared_config(request)
    carry = base.hydra.sweeper.carry
    if not file.chain:
        return [_checked(request, base, carry, note)]
    if base.hydra.sweeper.max_seeds:
        raise ConfigError(f"seed=auto: the stages of the chain sweep={file.name} hand on seeds: give seed=0,1,2,3")
    if carry:
        raise ConfigError(f"carry={carry[0]}: the chain sweep={file.name} carries by itself: leave it out")
    place = folder_of(request.overrides, [], base, base.hydra.sweeper.sweep_name)
    said = dict[str, None]()
    stages = [checked_stage(request, file.chain, stage, place, said.setdefault, started=False) for stage in file.chain]
    for text in said:
        note(text)
    return stages


def shared_config(request: Request) -> DictConfig:
    """Return the config of what all runs of a sweep share; Hydra's part has the options of the sweep."""
    return composed_alike(fixed(request.overrides), request.config_name)


def file_of(overrides: Sequence[str]) -> SweepFile:
    """Return the file of the requested sweep, or an empty one. Hydra must be ready to compose."""
    if (name := named_sweep(overrides)) is None:
        return SweepFile("")
    found = [source.load_config(f"sweep/{name}").config for source in sources() if source.is_config(f"sweep/{name}")]
    content: Any = OmegaConf.to_container(found[0]) if found else {}
    return sweep_file(name, content)


def checked_stage(
    request: Request, chain: Sequence[str], stage: str, place: Path, note: Note, started: bool = True
) -> CheckedSweep:
    """Return one sweep of a chain, every run of it checked; it writes to a folder below the chain's, `place`.

    `started`: the stages before it have finished, and those whose reference has run hand on what they found, behind
    overrides and the stage's own settings. `ConfigError` if an earlier stage is incomplete, or a run could not begin.
    """
    groups, given = options_by_group(), {key_of(word) for word in request.overrides}
    of_chain = ("sweep", "hydra.sweep.dir", "hydra.sweeper.sweep_name")
    words = [word for word in request.overrides if key_of(word) not in of_chain]
    choices = fixed([word for word in words if key_of(word) in groups])
    keys = {one: set(keys_below(composed_alike([f"sweep={one}", *choices], request.config_name))) for one in chain}
    elsewhere = set[str]().union(*keys.values()) - keys[stage] - groups.keys()  # settings of other stages alone
    words = [f"sweep={stage}", *(word for word in words if key_of(word) not in elsewhere)]
    words += [f"{key}={value}" for key, value in file_of(request.overrides).axes.items() if key not in given]
    earlier = chain[: chain.index(stage)] if started else []
    hand_on = [one for one in earlier if read_state(place / one).reference is not None]
    before = [str(place / one) for one in hand_on if file_of([f"sweep={one}"]).carries]
    arms = list[list[str]]()
    if (broad := file_of(words).best_of) in hand_on:
        from rlreason.report.carry import best_arms

        arms = [translated([f"{k}={v}" for k, v in arm.items()], note) for arm in best_arms(place / broad)]
        if with_meant(map(key_of, words)) & set(map(key_of, arms[0])):  # typed
            arms = []
        shown = "; ".join(map(" ".join, arms)) or "none: some are typed"
        note(f"note: {broad} hands on its best settings: {shown}")
    own = replace(request, overrides=words)
    return _checked(own, shared_config(own), before, note, place / stage, arms, waits=not started)


def designed(
    request: Request,
    base: DictConfig,
    note: Note,
    carried: Sequence[str] = (),
    folder: Path | None = None,
    arms: Sequence[Sequence[str]] = (),
) -> tuple[SweepState, Path]:
    """Return the requested sweep, its runs not yet checked, and its folder. Hydra must be ready to compose.

    `base`: the config of what its runs share. `carried`: overrides from finished sweeps, with lower precedence than
    typed ones and the sweep's own. Of a stage of a chain: `folder`, where it writes, and `arms`, cells that replace its
    own, the reference first.
    """
    words, name = request.overrides, request.config_name
    file = file_at(file_of(words), words, base, arms)
    axes = translated([f"{key}={value}" for key, value in file.axes.items()], note=str)  # a handout's names in a file
    refuse_wrong_words(axes)
    file = replace(file, axes=dict(word.split("=", 1) for word in axes))
    grid = grid_of(words, file, carried, note)
    folder = folder or folder_of(words, grid.swept, base, base.hydra.sweeper.sweep_name)
    return design_of(grid, file, folder, lambda overrides: composed_alike(overrides, name), str(base.seed)), folder


def _checked(
    request: Request,
    base: DictConfig,
    before: Sequence[str],
    note: Note,
    place: Path | None = None,
    arms: Sequence[Sequence[str]] = (),
    waits: bool = False,
) -> CheckedSweep:
    """Return the sweep with its design, its runs and their launcher; `ConfigError` if a run could not begin.

    `base`: the config of what its runs share. `before`: finished sweeps, names or folders, that hand on their winners.
    `place` and `arms`: of a stage of a chain.
    `waits`: the stages before it have not run, so that what begins from their models is only composed.
    """
    carried = list["Carried"]()
    if before:
        from rlreason.report.carry import carry, model_of, refuse_other_model, sweep_folder  # slow to import

        model, data = model_of(lambda key: OmegaConf.select(base, key)), str(OmegaConf.select(base, "data.name"))
        carried = [carry(sweep_folder(sweep, model, data)) for sweep in before]
        for one in carried:
            note(f"note: {one.sentence}")
    handed = {key_of(word): word for one in carried for word in translated(one.words, note)}  # a later sweep wins
    design, folder = designed(request, base, note, list(handed.values()), place, arms)
    if carried and place is None:
        first = composed(design.runs[0].overrides, request.config_name)  # unchecked: its model may be no folder here
        refuse_other_model(carried, model_of(lambda key: OmegaConf.select(first, key)))
    options = base.hydra.sweeper
    design.max_seeds = options.max_seeds or 0
    absent: list[str] | None = [] if options.dry else None
    runs, now = dict[str, AnyRunConfig](), list[RunState]()
    for run in design.runs:
        later = waits and str(folder.parent) in " ".join(run.overrides)
        runs[run.name] = composed_run(run.overrides, request.config_name, True, [] if later else absent).run
        now += [] if later else [run]
    checked = [runs[run.name] for run in now]
    if design.max_seeds:
        refuse_auto(design, checked)
    refuse_unread(checked, note)
    seen: dict[str, set[str]] = {}
    for run in now:
        own = set(run.overrides)
        if (same := seen.setdefault(repr(runs[run.name]), own)) != own:
            words = [" ".join(sorted(these - those)) for these, those in ((same, own), (own, same))]
            raise ConfigError(f"{' and '.join(words)} make the same run: another setting decides: leave that one out")
    jobs = jobs_of(request.overrides, list(runs.values()), options.jobs, options.gpus_per_run, note, absent)
    if absent is None:
        check_start(checked, folder, note)
    else:
        from rlreason.training.preflight import mistakes_of

        absent += [line for run in checked if works_on_a_model(run) for line in mistakes_of(run)]
        for line in dict.fromkeys(absent):
            note(f"! a start here would be refused: {line}")
        note("note: the plan alone: data, lengths of prompts and rewards of your own were not looked at")
    design.carried, design.jobs, design.launcher = list(map(asdict, carried)), jobs.side_by_side, jobs.launcher
    return CheckedSweep(request.overrides, folder, design, runs, jobs)


def refuse_auto(design: SweepState, runs: Sequence[AnyRunConfig]) -> None:
    """Raise `ConfigError` where seeds cannot be added by the verdicts of a sweep."""
    wrong = ""
    if len(design.settings()) < 2:
        wrong = "compares settings, and this sweep has one: vary one, or give seed=0,1,2,3"
    elif not all(map(works_on_a_model, runs)):
        wrong = "decides by accuracies, and runs of discovery have scores: give seed=0,1,2,3"
    elif any(works_on_a_model(run) and run.monitors.dominated == "stop" for run in runs):
        wrong = "stops settings by its own looks, and monitors.dominated=stop by others: leave one of them out"
    if wrong:
        raise ConfigError(f"seed=auto {wrong}")


# Its runs


def start_sweep(grid: "Grid", overrides: Sequence[str]) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; return the exit code: of the first sweep that failed.

    Typed again, it resumes.
    """
    hydra = grid.config.hydra
    ours = [word for word in hydra.overrides.hydra if not word.startswith("hydra.mode=")]
    request = Request({"config_name": hydra.job.config_name}, [*overrides, *ours])
    sweeps, chain = checked_sweep(request, say), file_of(request.overrides).chain
    if not chain or hydra.sweeper.dry:
        return sum(run_sweep(grid, sweep) for sweep in sweeps)
    for number, name in enumerate(chain, 1):
        say(f"\n=== stage {number} of {len(chain)}: {name}")
        if code := run_sweep(grid, checked_stage(request, chain, name, sweeps[0].folder.parent, say)):
            say(f"! stage {name} is not whole, and the later ones wait for it: type the command again")
            return code
    return 0


def run_sweep(grid: "Grid", sweep: CheckedSweep) -> int:
    """Print the plan of one sweep, run what is left of it, print the table of its settings; return the exit code.

    A sweep that is stopped prints the table of what there is; a refused one raises `ConfigError`.
    """
    from rlreason.training.preflight import own_sources  # slow to import

    design, folder, runs = sweep.design, sweep.folder, sweep.runs
    say("\n" + plan_text(design, folder, runs, sweep.jobs))
    if grid.config.hydra.sweeper.dry:
        say("dry: nothing was run; leave it out to start the sweep")
        return 0
    with run_lock(folder, say, "hydra.sweep.dir"):
        refuse_changed(
            folder,
            design.runs,
            lambda run: redacted(OmegaConf.to_yaml(OmegaConf.structured(runs[run.name]))),
            lambda run: own_sources(model) if works_on_a_model(model := runs[run.name]) else {},
        )
        design.command = shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])
        if design.max_seeds:
            run_looks(grid, sweep)
        else:
            run_batch(grid, sweep, begun(design, folder), design.runs)
    code = print_table(folder).code
    say(written_report(folder))
    return code


def run_looks(grid: "Grid", sweep: CheckedSweep) -> None:
    """Run the first seeds of all settings, look, and give more seeds to those whose verdict is open and may be decided.

    Looks that `sweep.json` holds are not taken again, but for settings that had failed or are typed later.
    """
    from rlreason.report.carry import look  # slow to import

    design, folder, before = sweep.design, sweep.folder, 0
    going = {run.key for run in design.runs}
    had = dict.fromkeys(going, design.max_seeds)  # seeds of each setting, once it gets no more
    for seeds in looks_of(design.max_seeds):
        runs = [run for run in design.runs if run.seed < min(seeds, had[run.key])]
        state = begun(replace(design, runs=runs), folder)
        run_batch(grid, sweep, state, [run for run in runs if run.seed >= before])
        earlier = [of for of in state.looks if of["seeds"] <= seeds]
        going -= {tuple(one["setting"].items()) for of in earlier for one in of["stopped"]}
        still = {tuple(one.items()) for of in earlier if of["seeds"] == seeds for one in of.get("open", [])}
        if new := going - still:  # not yet looked at: all, or those that have failed before or were typed later
            state.status = "running"  # until no seeds follow
            write_state(folder, state)
            ended, more = look(folder, seeds, new)
            going = (going & still) | more
            if ended or more:  # else all have failed
                of_look = [{"setting": dict(key), "reason": reason} for key, reason in ended.items()]
                state.looks.append({"seeds": seeds, "stopped": of_look, "open": list(map(dict, more))})
                write_state(folder, state)
                found = "; ".join(f"{setting_text(dict(key))}: {reason}" for key, reason in ended.items())
                say(f"== look with {seeds} seeds: {found or 'nothing is decided'}")
        if len(going) < 2:  # the reference alone
            state.close(folder, {})
            return
        had |= {key: seeds for key in had if key not in going and had[key] > seeds}
        before = seeds


def run_batch(grid: "Grid", sweep: CheckedSweep, state: SweepState, runs: Sequence[RunState]) -> None:
    """Have the launcher run those of these runs that have not ended; write the sweep's state before and after."""
    from rlreason.report.study import labels_of  # slow to import

    folder, jobs, left = sweep.folder, sweep.jobs, list[RunState]()
    for run in runs:
        done = state.run(run.name)
        if not done.of_its_own:
            left.append(run)
            continue
        how = "finished before" if done.figure is not None else done.status_text
        say(f"== {run.name}: {how}, not run again")
    if jobs.side_by_side > 1 and len(left) > 1:
        for run in left:
            state.run(run.name).shared_machine = True
    write_state(folder, state)
    labels = labels_of([run.key for run in left])
    lines = {folder / run.name: f"{label} seed {run.seed}" for run, label in zip(left, labels, strict=True)}
    try:
        with run_lines({} if jobs.launcher == JOBLIB else lines):  # whose runs print while others go on
            state.close(folder, launched(grid, sweep.overrides, jobs, folder, left) if left else {})
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt) or signals.stop_signal() is not None
        signals.arrived()
        state.close(folder, {}, "interrupted" if stopped else "failed")
        print_table(folder)
        raise


def written_report(folder: Path) -> str:
    """Write the report of a sweep as `rlreason report` does; return where it is, or why there is none."""
    from rlreason.cli.report import main as report  # slow to import

    try:
        return report(parser_of("report").parse_args([str(folder)]), Console()).text.splitlines()[-1]
    except Exception as error:  # which must not fail a sweep that has ended
        return f"! no report ({first_line(error)}): rlreason report {folder} writes it"


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and its notes."""
    from rlreason.report.read import read_study  # slow to import
    from rlreason.report.sections import judged_settings, measured_of, measured_table

    state = read_state(folder)
    if any(run.score is not None for run in state.runs):  # of discovery, which has a report of its own
        say("\n" + closing(state, folder, {}))
        return state
    study = read_study([folder])
    table = measured_table(study, measured_of(study))
    say("\n" + closing(state, folder, judged_settings(study), aligned([table.head, *table.rows]) if table else ""))
    return state
