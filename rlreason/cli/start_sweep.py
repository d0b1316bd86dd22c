"""Run a sweep for Hydra's sweeper of ours: check it, print its plan, have a launcher run its jobs, print its table.

overrides  ->  Request with its Design, every run checked (check_runs.py)  ->  plan  ->  what is left of its runs
           ->  jobs of a launcher, whose runs write their folders     ->  sweep.json and the table
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlreason.cli.check_runs import checked_sweep, stage_of
from rlreason.cli.flags import Request, SweepOptions
from rlreason.cli.launchers import GROUP, HERE, PROCESSES, Jobs, chosen_launcher, set_up
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.config.run import works_on_a_model
from rlreason.errors import ConfigError
from rlreason.records.reader import sweep_code, write_status
from rlreason.runtime import signals
from rlreason.runtime.files import run_lock
from rlreason.runtime.text import first_line, redacted
from rlreason.sweeps.carry import setting_text
from rlreason.sweeps.closing import closing
from rlreason.sweeps.preview import plan_text
from rlreason.sweeps.processes import PARENT, divide_processors, failure, gpus_needed
from rlreason.sweeps.state import (
    KILLED,
    WAITING,
    Design,
    RunState,
    SweepState,
    new_state,
    read_state,
    refuse_changed,
    wait_for_earlier,
    write_state,
)

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Grid

DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.")  # Hydra's settings that a design sets
say = partial(print, flush=True)


def start_sweep(grid: "Grid", overrides: Sequence[str]) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; return the exit code: of the first sweep that failed.

    Typed again, it resumes.
    """
    request = _request(grid, overrides)
    with mistakes_in(request.overrides), in_one_line(request.overrides, request.config_name):
        request = checked_sweep(request, say)
        if not request.chain:
            return _run_sweep(grid, request)
        if request.options.dry:
            for stage in request.stages:
                _run_sweep(grid, stage)
            return 0
        for number, name in enumerate(request.chain, 1):
            say(f"\n=== stage {number} of {len(request.chain)}: {name}")
            if code := _run_sweep(grid, stage_of(request, name)):
                say(f"! stage {name} is not whole, and the later ones wait for it: type the command again")
                return code
    return 0


def _request(grid: "Grid", overrides: Sequence[str]) -> Request:
    """Return the sweep that the overrides ask for, with the options that `SweepOptions.overrides` has handed on."""
    hydra, flags = grid.config.hydra, {"multirun": True, "config_name": grid.config.hydra.job.config_name}
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags["config_dir"] = source.path
    given = hydra.sweeper
    options = SweepOptions(given.jobs, given.gpus_per_run, given.dry, tuple(given.carry), given.sweep_name)
    ours = [word for word in hydra.overrides.hydra if not word.startswith(("hydra.mode=", "hydra.sweeper."))]
    return Request(flags, [*overrides, *ours], options=options)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One checked sweep, with its launcher and how that is set up."""

    request: Request
    design: Design
    launcher: str
    words: list[str]  # overrides of Hydra's own settings, except those that the design sets
    jobs: Jobs


def _run_sweep(grid: "Grid", request: Request) -> int:
    """Print the plan of one sweep, run what is left of it, print the table of its settings; return the exit code.

    A sweep that is stopped prints the table of what there is; a refused one raises `ConfigError`.
    """
    assert request.design is not None
    launcher, design = chosen_launcher(request.overrides), request.design
    words = [word for word in request.overrides if word.startswith(("hydra.", "hydra/"))]
    words = [word for word in words if not word.startswith(DESIGNED)]
    jobs = set_up(launcher, words, request.options.jobs, len(design.runs), request.gpus)
    sweep = _Sweep(request, design, launcher, words, jobs)
    say("\n" + _plan(sweep))
    if request.options.dry:
        say("dry: nothing was run; leave it out to start the sweep")
        return 0
    with run_lock(design.folder, say, "hydra.sweep.dir"):
        refuse_changed(design, lambda run: redacted(OmegaConf.to_yaml(OmegaConf.structured(request.runs[run.name]))))
        wait_for_earlier(design, say)
        state, left = _begun(sweep)
        try:
            _close(state, design.folder, _launched(grid, sweep, left) if left else {})
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt) or signals.stop_signal() is not None
            signals.arrived()
            _close(state, design.folder, {}, "interrupted" if stopped else "failed")
            print_table(design.folder)
            raise
    return code_of(print_table(design.folder))


def _plan(sweep: _Sweep) -> str:
    """Return the plan of a sweep; where losses differ, it looks at one run of each setting."""
    from rlreason.training.preflight import RECORDS, space_needed

    design, gpus = sweep.design, sweep.request.gpus
    by_setting = {setting_text(run.setting): run for run in reversed(design.runs)}
    names = [setting_text(setting) for setting in design.settings()]
    if not {"loss", "loss.loss_type", "objective"} & set(design.axes):
        names = names[:1]
    settings = {name: sweep.request.runs[by_setting[name].name] for name in names}
    lines = {
        "launcher": sweep.jobs.line(sweep.launcher),
        "GPUs": gpus.line(sweep.request.options.jobs, len(design.runs)),
    }
    first = settings[names[0]]
    space = RECORDS + (space_needed(first).left if works_on_a_model(first) else 0)
    shared = 1 if gpus.handed_out or sweep.launcher not in HERE else sweep.jobs.side_by_side
    return plan_text(design, settings, sweep.jobs.side_by_side, shared, space, lines)


def _begun(sweep: _Sweep) -> tuple[SweepState, list[RunState]]:
    """Write the state of a sweep that begins, print which of its runs are not run again, and return the others."""
    jobs, design = sweep.jobs, sweep.design
    command = shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])
    state = new_state(design, jobs.side_by_side, sweep.launcher, command, sweep.request.carried)
    left = []
    for planned in design.runs:
        run = state.run(planned.name)
        if run.of_its_own:
            say(f"== {run.name}: {'finished before' if run.figure is not None else run.status_text}, not run again")
        else:
            left.append(planned)
    for planned in left if jobs.side_by_side > 1 and len(left) > 1 else []:
        state.run(planned.name).shared_machine = True
    write_state(design.folder, state)
    return state, left


def _launched(grid: "Grid", sweep: _Sweep, left: Sequence[RunState]) -> dict[str, Exception | None]:
    """Run what is left of a sweep; return the error of each job, by the name of its run."""
    gpus = sweep.request.gpus
    words = [*left[0].overrides, *sweep.words, *sweep.jobs.words, f"hydra.sweep.dir='{sweep.design.folder}'"]
    if sweep.launcher == PROCESSES:
        runs = [sweep.request.runs[run.name] for run in left]
        needs = [gpus.of_run(gpus_needed(run)) if gpus.handed_out else 0 for run in runs]
        of_vllm = any(works_on_a_model(run) and run.rollout.engine == "vllm" for run in runs)
        words.append(f"hydra.launcher.needs={needs}")
        words += ["hydra.launcher.preload=false"] if len(runs) == 1 or of_vllm else []  # vLLM decides as it is loaded
    if sweep.launcher in HERE:
        os.environ[PARENT] = str(os.getpid())
        divide_processors(sweep.jobs.side_by_side)
    jobs = [[*run.overrides, f"hydra.sweep.subdir='{run.name}'"] for run in left]
    size, results = sweep.jobs.batch or len(jobs), list[Any]()
    try:
        config = grid.hydra_context.config_loader.load_configuration(
            sweep.request.config_name, [*words, "hydra.mode=MULTIRUN"], run_mode=RunMode.MULTIRUN
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=grid.hydra_context, task_function=grid.task_function, config=config
        )
        for first in range(0, len(jobs), size):
            results += launcher.launch(jobs[first : first + size], initial_job_idx=first)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={sweep.launcher} cannot be loaded ({error}): install its package") from None
    except Exception as error:  # joblib and submitit give up when the process of one run is killed
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        say(f"! {sweep.launcher} gave up: {type(error).__name__}: {first_line(error)}")
        return {run.name: error for run in left}
    return {run.name: failure(result) for run, result in zip(left, results, strict=True)}


def _close(state: SweepState, folder: Path, errors: Mapping[str, Exception | None], status: str = "") -> None:
    """Write the final state of a sweep: of each run what its folder says, else the error of its job."""
    state.refresh(folder, say)
    for run in state.runs:
        error = errors.get(run.name)
        if error is None or run.of_its_own:
            continue
        if run.reason == KILLED:
            write_status(folder / run.name, "failed", first_line(error))
        if run.reason == KILLED or run.status == WAITING:  # then it was refused before it wrote anything
            run.status, run.reason = "failed", first_line(error)
    state.status = status or {0: "finished", 130: "interrupted"}.get(code_of(state), "failed")
    write_state(folder, state)


def code_of(state: SweepState) -> int:
    """Return the exit code of a sweep that has ended: see `records.reader.sweep_code`."""
    return sweep_code(["failed" if run.status in (WAITING, "running") else run.status for run in state.runs])


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and its notes."""
    from rlreason.report.read import read_study  # slow to import
    from rlreason.report.tables import judged_settings

    state = read_state(folder)
    scored = any(run.score is not None for run in state.runs)  # of discovery, which has a report of its own
    say("\n" + closing(state, folder, {} if scored else judged_settings(read_study([folder]))))
    return state
