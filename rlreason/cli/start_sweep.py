"""Start a sweep, by our own loop or by one of Hydra's launchers, after printing its plan."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.check import stage_of
from rlreason.cli.flags import Request
from rlreason.cli.options import BASIC, HERE, RAY, SLURM, Jobs, chosen_launcher, launcher_of, set_up, settings_of
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import register, typed
from rlreason.errors import ConfigError
from rlreason.records.status import sweep_code
from rlreason.runtime import signals
from rlreason.runtime.text import redacted
from rlreason.sweeps.carry import setting_text, watch
from rlreason.sweeps.closing import closing, runs_table
from rlreason.sweeps.design import Composed, Design, PlannedRun
from rlreason.sweeps.elsewhere import RayCluster, SlurmCluster, run_elsewhere
from rlreason.sweeps.gpus import gpus_needed
from rlreason.sweeps.launched import LOG, Sweep, launch_sweep
from rlreason.sweeps.plan import one_formula, plan_text
from rlreason.sweeps.runner import SweepWork, code_of, run_sweep
from rlreason.sweeps.state import FILE, SweepState, read_state

DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.params")  # Hydra's settings that a design sets


def announce(request: Request, design: Design) -> AnyRunConfig:
    """Print the plan of a sweep; return the settings of its first run. Hydra must be ready to compose."""
    run = run_of(request, design.runs[0])
    jobs = jobs_of(request, design)
    launcher = chosen_launcher(request.overrides)
    hands_out = {"launcher": jobs.line(launcher), "GPUs": request.gpus.line(request.options.jobs, len(design.runs))}
    apart = request.gpus.apart or launcher not in HERE
    alike = one_formula(losses_of(request, design))
    print("\n" + plan_text(design, [run], jobs.side_by_side, space_of, hands_out, apart, alike), flush=True)
    if request.options.dry:
        print("dry: nothing was run; leave it out to start the sweep", flush=True)
    return run


def jobs_of(request: Request, design: Design) -> Jobs:
    """Return how the launcher of a sweep runs its runs."""
    launcher, words = chosen_launcher(request.overrides), launcher_overrides(request)
    return set_up(launcher, words, request.options.jobs, len(design.runs), request.gpus)


def launcher_overrides(request: Request) -> list[str]:
    """Return the overrides for Hydra's launchers, except those that the design sets."""
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


Task = Callable[[DictConfig], Any]  # a launcher's job, given the config of its run


def start_sweep(hydra: Hydra, request: Request, task: Task) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; return the exit code.

    `task`: what a job of a launcher or a sweeper does.
    """
    if request.chain and request.options.dry:
        for name in request.chain:
            staged = stage_of(request, name, str, started=False, most=1)  # all were checked before
            assert staged.design is not None
            announce(staged, staged.design)
        return 0
    if request.chain:
        return run_chain(hydra, request.chain, partial(stage_of, request), task)
    if request.design is None:
        return start_drawn_sweep(hydra, request, task)
    if request.options.dry:
        announce(request, request.design)
        return 0
    return code_of(run_design(hydra, request, request.design, task))


def run_chain(hydra: Hydra, stages: Sequence[str], stage: Callable[[str], Request], task: Task) -> int:
    """Run sweeps one after the other; return the exit code: of the first that failed, else 0.

    `stage`: prepares a sweep by its name; called when the sweeps before it are done. Typed again, the chain resumes.
    """
    for number, name in enumerate(stages, 1):
        print(f"\n=== stage {number} of {len(stages)}: {name}", flush=True)
        request = stage(name)
        assert request.design is not None
        if code := code_of(run_design(hydra, request, request.design, task)):
            print(f"! stage {name} is not whole, and the later ones wait for it: type the command again", flush=True)
            return code
    return 0


def run_design(hydra: Hydra, request: Request, design: Design, task: Task) -> SweepState:
    """Run every run of a sweep, then print the table of its settings; if it was stopped, of those so far.

    A refused sweep raises `ConfigError`.
    """
    command = shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])
    run = announce(request, design)
    watched = works_on_a_model(run) and run.monitors.dominated == "stop"
    after_run = watch(design.folder) if watched else None
    compose_run = partial(composed_run, request.config_name)
    work = SweepWork(design, compose_run, request.sources(), command, after_run, request.carried, request.gpus)
    launcher = chosen_launcher(request.overrides)
    try:
        if launcher == BASIC:
            run_sweep(work, jobs_of(request, design).side_by_side)
        else:
            _launched(hydra, request, work, launcher, task)
    except ConfigError:
        raise
    except BaseException:
        if (design.folder / FILE).exists():
            print_table(design.folder)
        raise
    return print_table(design.folder)


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and its notes."""
    from rlreason.report.read import read_study  # slow to import
    from rlreason.report.tables import judged_settings

    state = read_state(folder)
    scored = any(run.score is not None for run in state.runs)  # of discovery, which has a report of its own
    print("\n" + closing(state, folder, {} if scored else judged_settings(read_study([folder]))), flush=True)
    return state


def _launched(hydra: Hydra, request: Request, work: SweepWork, launcher: str, task: Task) -> None:
    """Run a sweep by one of Hydra's launchers."""
    design = work.design
    jobs = jobs_of(request, design)
    words = [*design.runs[0].overrides, *launcher_overrides(request), *jobs.words]
    if launcher in (SLURM, RAY):
        settings = settings_of(hydra, request.config_name, words, design.folder)
        place = design.folder / f".{launcher}"
        cluster = SlurmCluster(place, settings) if launcher == SLURM else RayCluster(settings, jobs.gpus)
        run_elsewhere(work, cluster, place, jobs.side_by_side)
        return
    start = launcher_of(hydra, request.config_name, words, design.folder, task)

    def launch(runs: Sequence[PlannedRun]) -> Sequence[Exception | None]:
        return start([(run.name, run.overrides) for run in runs])

    launch_sweep(work, launcher, launch, jobs.side_by_side, jobs.batch, jobs.shows_gpus)


def composed_run(config_name: str, run: PlannedRun) -> Composed:
    """Return the config of a run of a sweep, as the run will write it. Hydra must be ready to compose."""
    cfg = compose(config_name, list(run.overrides))
    settings = typed(cfg, of_sweep=True)
    # vLLM decides while it is loaded how it uses the processors.
    may_fork = works_on_a_model(settings) and settings.rollout.engine != "vllm"
    config = redacted(OmegaConf.to_yaml(cfg, resolve=True))
    return Composed(config, settings.waits.run_s, gpus_needed(settings), may_fork)


def start_sweep_run(cfg: DictConfig) -> float:
    """Run one job of a launcher or sweeper in a process of its own; return the accuracy (Optuna's sweeper uses it)."""
    register()  # a launcher's process has only imported this program
    run = typed(cfg, of_sweep=True)
    config, hydra_config = redacted(OmegaConf.to_yaml(cfg, resolve=True)), HydraConfig.get()
    folder, name = Path(hydra_config.runtime.output_dir), Path(hydra_config.sweep.dir).name
    composed = Composed(config, run.waits.run_s, gpus_needed(run))
    return Sweep.of_environment().run(name, folder, list(hydra_config.overrides.task), composed).accuracy


def start_drawn_sweep(hydra: Hydra, request: Request, task: Task) -> int:
    """Run a sweep whose sweeper draws the values of its runs one after the other."""
    with signals.temporary_folder("rlreason-sweep-") as place:
        gpus, per_run = request.gpus.handed_out, request.gpus.per_run
        log = Sweep(request.sources(), str(Path(place) / LOG), gpus=gpus, gpus_per_run=per_run, locks=place)
        log.announce()
        try:
            hydra.multirun(request.config_name, task, [*request.overrides, "hydra.mode=MULTIRUN"])
        finally:
            runs = log.runs()
            if runs:
                print("\n" + runs_table(runs))
    if not runs:  # a launcher on machines that share no files with this one
        print("rlreason: no run of the sweep has reported here how it ended: see their folders", file=sys.stderr)
        return 1
    return sweep_code([run.status for run in runs])
