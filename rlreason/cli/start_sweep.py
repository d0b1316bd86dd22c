"""Run a sweep for Hydra's sweeper of ours: its plan, the checks of all runs, its jobs by any launcher, its table."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.check import checked_sweep, stage_of
from rlreason.cli.flags import Request, SweepOptions
from rlreason.cli.launchers import GROUP, HERE, PROCESSES, Jobs, chosen_launcher, set_up
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.records.reader import read_status, sweep_code, write_status
from rlreason.runtime import signals
from rlreason.runtime.files import holder, run_lock
from rlreason.runtime.text import first_line, redacted
from rlreason.sweeps.carry import setting_text
from rlreason.sweeps.closing import closing
from rlreason.sweeps.preview import one_formula, plan_text
from rlreason.sweeps.processes import PARENT, divide_processors, failure, gpus_needed
from rlreason.sweeps.state import (
    WAITING,
    Composed,
    Design,
    PlannedRun,
    SweepState,
    new_state,
    note_stopped,
    read_state,
    refreshed,
    refuse_changed,
    wait_for_earlier,
    write_state,
)

DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.")  # Hydra's settings that a design sets
say = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class Multirun:
    """What Hydra hands to a sweeper: how configs are composed, what a job does, and the sweep's config."""

    context: HydraContext
    task: TaskFunction
    config: DictConfig

    def request(self, overrides: Sequence[str]) -> Request:
        """Return the sweep that the overrides ask for, with the options that `SweepOptions.overrides` has handed on."""
        hydra, flags = self.config.hydra, {"multirun": True, "config_name": self.config.hydra.job.config_name}
        for source in hydra.runtime.config_sources:
            if source.provider == "command-line":
                flags["config_dir"] = source.path
        given = hydra.sweeper
        options = SweepOptions(given.jobs, given.gpus_per_run, given.dry, tuple(given.carry), given.sweep_name)
        ours = [word for word in hydra.overrides.hydra if not word.startswith(("hydra.mode=", "hydra.sweeper."))]
        return Request(flags, [*overrides, *ours], options=options)

    def launch(self, overrides: Sequence[str], batches: Sequence[Sequence[PlannedRun]]) -> list[Any]:
        """Have the launcher that the overrides choose and set up run these runs, a batch after the other.

        Return Hydra's result of each.
        """
        name = self.config.hydra.job.config_name
        config = self.context.config_loader.load_configuration(
            name, [*overrides, "hydra.mode=MULTIRUN"], run_mode=RunMode.MULTIRUN
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.context, task_function=self.task, config=config
        )
        results: list[Any] = []
        for batch in batches:
            jobs = [[*run.overrides, f"hydra.sweep.subdir='{run.name}'"] for run in batch]
            results += launcher.launch(jobs, initial_job_idx=len(results))
        return results


def start_sweep(multirun: Multirun, overrides: Sequence[str]) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; return the exit code."""
    request = multirun.request(overrides)
    with mistakes_in(request.overrides), in_one_line(request.overrides, request.config_name):
        request = checked_sweep(request, say)
        if not request.chain:
            assert request.design is not None
            return run_design(multirun, request, request.design)
        if not request.options.dry:
            return run_chain(multirun, request)
        for name in request.chain:
            staged = stage_of(request, name, str, started=False, most=1)  # all were checked before
            assert staged.design is not None
            announce(staged, staged.design)
    return 0


def run_chain(multirun: Multirun, request: Request) -> int:
    """Run sweeps one after the other; return the exit code: of the first that failed, else 0.

    Typed again, the chain resumes.
    """
    for number, name in enumerate(request.chain, 1):
        say(f"\n=== stage {number} of {len(request.chain)}: {name}")
        staged = stage_of(request, name)
        assert staged.design is not None
        if code := run_design(multirun, staged, staged.design):
            say(f"! stage {name} is not whole, and the later ones wait for it: type the command again")
            return code
    return 0


def announce(request: Request, design: Design) -> None:
    """Print the plan of a sweep."""
    run = run_of(request, design.runs[0])
    jobs, launcher = jobs_of(request, design), chosen_launcher(request.overrides)
    hands_out = {"launcher": jobs.line(launcher), "GPUs": request.gpus.line(request.options.jobs, len(design.runs))}
    apart = request.gpus.apart or launcher not in HERE
    alike = one_formula(losses_of(request, design))
    say("\n" + plan_text(design, [run], jobs.side_by_side, space_of, hands_out, apart, alike))
    if request.options.dry:
        say("dry: nothing was run; leave it out to start the sweep")


def jobs_of(request: Request, design: Design) -> Jobs:
    """Return how the launcher of a sweep runs its runs."""
    launcher, words = chosen_launcher(request.overrides), launcher_overrides(request)
    return set_up(launcher, words, request.options.jobs, len(design.runs), request.gpus)


def launcher_overrides(request: Request) -> list[str]:
    """Return the overrides of Hydra's own settings, except those that the design sets."""
    ours = [word for word in request.overrides if word.startswith(("hydra.", "hydra/"))]
    return [word for word in ours if not word.startswith(DESIGNED)]


def losses_of(request: Request, design: Design) -> dict[str, AnyRunConfig]:
    """Return the settings of one run per setting if their losses may differ; otherwise {}, to save time."""
    if not {"loss", "loss.loss_type", "objective"} & set(design.axes):
        return {}
    of_each = {setting_text(run.setting): run for run in reversed(design.runs)}
    return {name: run_of(request, of_each[name]) for name in map(setting_text, design.settings())}


def run_of(request: Request, run: PlannedRun) -> AnyRunConfig:
    """Return the settings of a planned run."""
    cfg = compose(request.config_name, list(run.overrides))
    OmegaConf.resolve(cfg)
    return typed(cfg, of_sweep=True, absent=[] if request.options.dry else None)  # reported when they were checked


def space_of(run: AnyRunConfig) -> float:
    """Return the bytes that a run may leave, by its settings: model, responses, checkpoints and small files."""
    from rlreason.training.preflight import RECORDS, space_needed

    return float(RECORDS + (space_needed(run).left if works_on_a_model(run) else 0))


def composed_run(config_name: str, run: PlannedRun) -> Composed:
    """Return the config of a run of a sweep, as the run will write it. Hydra must be ready to compose."""
    cfg = compose(config_name, list(run.overrides))
    settings = typed(cfg, of_sweep=True)
    vllm = works_on_a_model(settings) and settings.rollout.engine == "vllm"
    return Composed(redacted(OmegaConf.to_yaml(cfg, resolve=True)), gpus_needed(settings), vllm)


def run_design(multirun: Multirun, request: Request, design: Design) -> int:
    """Run what is left of a sweep, print the table of its settings, and return the exit code.

    A sweep that is stopped prints the table of what there is; a refused one raises `ConfigError`.
    """
    announce(request, design)
    if request.options.dry:
        return 0
    compose_run = partial(composed_run, request.config_name)
    with run_lock(design.folder, say, "hydra.sweep.dir"):
        refuse_changed(design, compose_run)
        wait_for_earlier(design, say)
        work = _begun(request, design)
        try:
            errors = _launched(multirun, work, compose_run)
            _close(work, errors)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt) or signals.stop_signal() is not None
            signals.arrived()
            _close(work, {}, "interrupted" if stopped else "failed")
            print_table(design.folder)
            raise
    return code_of(print_table(design.folder))


def code_of(state: SweepState) -> int:
    """Return the exit code of a sweep that has ended: see `records.reader.sweep_code`."""
    return sweep_code(["failed" if run.status in (WAITING, "running") else run.status for run in state.runs])


@dataclass(frozen=True, slots=True)
class _Work:
    """A sweep that has begun: `left` of its runs have not reached an end of their own."""

    request: Request
    design: Design
    launcher: str
    jobs: Jobs
    state: SweepState
    left: list[PlannedRun]


def _begun(request: Request, design: Design) -> _Work:
    """Write the state of a sweep that begins, and print which of its runs are not run again."""
    jobs, launcher = jobs_of(request, design), chosen_launcher(request.overrides)
    command = shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])
    state = new_state(design, jobs.side_by_side, launcher, command, request.carried)
    left = [planned for planned in design.runs if not state.run(planned.name).of_its_own]
    for run in state.runs:
        if run.of_its_own and run.name in {planned.name for planned in design.runs}:
            say(f"== {run.name}: {'finished before' if run.figure is not None else run.status_text}, not run again")
    for planned in left:
        run = state.run(planned.name)
        run.shared_machine = run.shared_machine or (jobs.side_by_side > 1 and len(left) > 1)
    write_state(design.folder, state)
    return _Work(request, design, launcher, jobs, state, left)


def _launched(
    multirun: Multirun, work: _Work, composed: Callable[[PlannedRun], Composed]
) -> dict[str, Exception | None]:
    """Run what is left; return the error of each job, by the name of its run."""
    if not work.left:
        return {}
    words = [*work.design.runs[0].overrides, *launcher_overrides(work.request), *work.jobs.words]
    if work.launcher == PROCESSES:
        runs = [composed(run) for run in work.left]
        plan = work.request.gpus
        words += [f"hydra.launcher.needs={[plan.of_run(run.gpus) if plan.apart else 0 for run in runs]}"]
        words += ["hydra.launcher.preload=false"] if len(runs) == 1 or any(run.vllm for run in runs) else []
    if work.launcher in HERE:
        os.environ[PARENT] = str(os.getpid())
        divide_processors(work.jobs.side_by_side)
    size = work.jobs.batch or len(work.left)
    batches = [work.left[at : at + size] for at in range(0, len(work.left), size)]
    try:
        results = multirun.launch([*words, f"hydra.sweep.dir='{work.design.folder}'"], batches)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={work.launcher} cannot be loaded ({error}): install its package") from None
    except Exception as error:  # joblib and submitit give up when the process of one run is killed
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        say(f"! {work.launcher} gave up: {type(error).__name__}: {first_line(error)}")
        return {run.name: error for run in work.left}
    return {run.name: failure(result) for run, result in zip(work.left, results, strict=True)}


def _close(work: _Work, errors: Mapping[str, Exception | None], status: str = "") -> None:
    """Write the final state of a sweep: of each run what its folder says, else the error of its job."""
    state, folder = work.state, work.design.folder
    for run in state.runs:
        refreshed(run, folder, say)
        error = errors.get(run.name)
        if status == "interrupted" or error is None or run.of_its_own:
            continue
        if read_status(folder / run.name) == "running" and holder(folder / run.name) is None:  # it was killed
            write_status(folder / run.name, "failed", first_line(error))
            refreshed(run, folder, say)
        if run.status == WAITING:  # it was refused before it wrote anything
            run.status, run.reason = "failed", first_line(error)
    if not status:
        status = {0: "finished", 130: "interrupted"}.get(code_of(state), "failed")
    state.status = status
    write_state(folder, note_stopped(state))


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and its notes."""
    from rlreason.report.read import read_study  # slow to import
    from rlreason.report.tables import judged_settings

    state = read_state(folder)
    scored = any(run.score is not None for run in state.runs)  # of discovery, which has a report of its own
    say("\n" + closing(state, folder, {} if scored else judged_settings(read_study([folder]))))
    return state
