"""Run a sweep for Hydra's sweeper of ours: check it, print its plan, have a launcher run its jobs, print its table.

overrides  ->  Request with its runs, every run checked (check_runs.py)  ->  plan  ->  what is left of its runs
           ->  jobs of a launcher, whose runs write their folders     ->  sweep.json and the table
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from rlreason.cli.check_runs import checked_sweep, stage_of
from rlreason.cli.flags import Request, SweepOptions
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.runtime import signals
from rlreason.runtime.files import run_lock
from rlreason.runtime.text import redacted
from rlreason.sweeps.launcher import launched
from rlreason.sweeps.state import SweepState, begun, read_state, refuse_changed, write_state
from rlreason.sweeps.texts import closing, plan_text

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Grid

say = partial(print, flush=True)


def start_sweep(grid: "Grid", overrides: Sequence[str]) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; return the exit code: of the first sweep that failed.

    Typed again, it resumes.
    """
    hydra, flags = grid.config.hydra, {"multirun": True, "config_name": grid.config.hydra.job.config_name}
    for source in hydra.runtime.config_sources:
        flags |= {"config_dir": source.path} if source.provider == "command-line" else {}
    given = hydra.sweeper
    options = SweepOptions(given.jobs, given.gpus_per_run, given.dry, tuple(given.carry), given.sweep_name)
    ours = [word for word in hydra.overrides.hydra if not word.startswith(("hydra.mode=", "hydra.sweeper."))]
    request = Request(flags, [*overrides, *ours], options=options)
    with mistakes_in(request.overrides), in_one_line(request.overrides, request.config_name):
        request = checked_sweep(request, say)
        if not request.chain:
            return _run_sweep(grid, request)
        if request.options.dry:
            return sum(_run_sweep(grid, stage) for stage in request.stages)
        for number, name in enumerate(request.chain, 1):
            say(f"\n=== stage {number} of {len(request.chain)}: {name}")
            if code := _run_sweep(grid, stage_of(request, name)):
                say(f"! stage {name} is not whole, and the later ones wait for it: type the command again")
                return code
    return 0


def _run_sweep(grid: "Grid", request: Request) -> int:
    """Print the plan of one sweep, run what is left of it, print the table of its settings; return the exit code.

    A sweep that is stopped prints the table of what there is; a refused one raises `ConfigError`.
    """
    design, folder, runs, jobs = request.design, request.folder, request.runs, request.jobs
    assert design is not None
    assert folder is not None
    say("\n" + plan_text(design, folder, runs, jobs))
    if request.options.dry:
        say("dry: nothing was run; leave it out to start the sweep")
        return 0
    with run_lock(folder, say, "hydra.sweep.dir"):
        refuse_changed(
            folder, design.runs, lambda run: redacted(OmegaConf.to_yaml(OmegaConf.structured(runs[run.name])))
        )
        state = begun(replace(design, command=shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])), folder)
        done = {run.name: run for run in state.runs if run.of_its_own}
        left = [run for run in design.runs if run.name not in done]
        for name in [run.name for run in design.runs if run.name in done]:
            how = "finished before" if done[name].figure is not None else done[name].status_text
            say(f"== {name}: {how}, not run again")
        for run in left if jobs.side_by_side > 1 and len(left) > 1 else []:
            state.run(run.name).shared_machine = True
        write_state(folder, state)
        try:
            state.close(folder, launched(grid, request.overrides, jobs, folder, left) if left else {})
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt) or signals.stop_signal() is not None
            signals.arrived()
            state.close(folder, {}, "interrupted" if stopped else "failed")
            print_table(folder)
            raise
    return print_table(folder).code


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and its notes."""
    from rlreason.report.read import read_study  # slow to import
    from rlreason.report.sections import judged_settings

    state = read_state(folder)
    scored = any(run.score is not None for run in state.runs)  # of discovery, which has a report of its own
    say("\n" + closing(state, folder, {} if scored else judged_settings(read_study([folder]))))
    return state
