"""Start a sweep: by our own loop or by one of Hydra's launchers; what it says first."""

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
from rlreason.cli.flags import Asked
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

DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.params")  # of Hydra's words, what a design says


def announce(asked: Asked, design: Design) -> AnyRunConfig:
    """Print the plan of a sweep; returns the settings of its first run. Hydra must be ready to compose."""
    run = first_run(asked, design)
    jobs = jobs_of(asked, design)
    launcher = chosen_launcher(asked.overrides)
    hands_out = {"launcher": jobs.line(launcher), "GPUs": asked.gpus.line(asked.own.jobs, len(design.runs))}
    apart = asked.gpus.apart or launcher not in HERE
    alike = one_formula(losses_of(asked, design))
    print("\n" + plan_text(design, [run], jobs.side_by_side, space_of, hands_out, apart, alike), flush=True)
    if asked.own.dry:
        print("dry: nothing was run; leave it out to start the sweep", flush=True)
    return run


def jobs_of(asked: Asked, design: Design) -> Jobs:
    """How the launcher of a sweep runs its runs."""
    return set_up(
        chosen_launcher(asked.overrides), words_of_launcher(asked), asked.own.jobs, len(design.runs), asked.gpus
    )


def words_of_launcher(asked: Asked) -> list[str]:
    """The words that are for Hydra's launchers, but for those that a design says."""
    ours = [word for word in asked.overrides if word.startswith(("hydra.", "hydra/"))]
    return [word for word in ours if not word.startswith(DESIGNED)]


def losses_of(asked: Asked, design: Design) -> dict[str, AnyRunConfig]:
    """The settings of one run of each setting, where their losses may differ; nothing else is worth the time."""
    if not {"loss", "loss.loss_type", "objective"} & set(design.axes):
        return {}
    of_each = {setting_text(run.setting): run for run in reversed(design.runs)}
    return {name: run_of(asked, of_each[name]) for name in map(setting_text, design.settings())}


def first_run(asked: Asked, design: Design) -> AnyRunConfig:
    """The settings of a sweep's first run."""
    return run_of(asked, design.runs[0])


def run_of(asked: Asked, run: PlannedRun) -> AnyRunConfig:
    """The settings of a planned run."""
    cfg = compose(asked.config_name, list(run.overrides))
    OmegaConf.resolve(cfg)
    return typed(cfg, of_sweep=True, absent=[] if asked.own.dry else None)  # said when they were checked


def space_of(run: AnyRunConfig) -> float:
    """Bytes that a run may leave, by its settings: model, responses, checkpoints and small files."""
    from rlreason.training.preflight import (  # it knows the tiny model's tokenizer, which takes a while
        RECORDS,
        space_needed,
    )

    return float(RECORDS + (space_needed(run).left if works_on_a_model(run) else 0))


def after_run_of(run: AnyRunConfig, design: Design) -> Callable[[SweepState], list[dict[str, Any]]] | None:
    """What the sweep asks after each run: which settings to stop; None where `monitors.dominated` is off.

    `run`: the settings of one of its runs.
    """
    watched = works_on_a_model(run) and run.monitors.dominated == "stop"
    return watch(design.folder) if watched else None


Task = Callable[[DictConfig], Any]  # what a launcher's job does with the config of its run


def start_sweep(hydra: Hydra, asked: Asked, task: Task) -> int:
    """Run every run of a sweep, or of the sweeps of a chain; returns the exit code.

    `task`: what a job of a launcher or a sweeper does.
    """
    if asked.chain and asked.own.dry:
        for name in asked.chain:
            staged = stage_of(asked, name, str, started=False, most=1)  # all were checked before
            assert staged.design is not None
            announce(staged, staged.design)
        return 0
    if asked.chain:
        return run_chain(hydra, asked.chain, partial(stage_of, asked), task)
    if asked.design is None:
        return start_drawn_sweep(hydra, asked, task)
    if asked.own.dry:
        announce(asked, asked.design)
        return 0
    return code_of(run_design(hydra, asked, asked.design, task))


def run_chain(hydra: Hydra, stages: Sequence[str], stage: Callable[[str], Asked], task: Task) -> int:
    """Run sweeps one after the other; returns the exit code: of the first that failed, else 0.

    `stage`: makes a sweep ready by its name; asked when those before it are done. Typed again, the chain goes on.
    """
    for number, name in enumerate(stages, 1):
        print(f"\n=== stage {number} of {len(stages)}: {name}", flush=True)
        asked = stage(name)
        assert asked.design is not None
        if code := code_of(run_design(hydra, asked, asked.design, task)):
            print(f"! stage {name} is not whole, and the later ones wait for it: type the command again", flush=True)
            return code
    return 0


def run_design(hydra: Hydra, asked: Asked, design: Design, task: Task) -> SweepState:
    """Run every run of a sweep, then print the table of its settings; of those so far where it was stopped.

    A sweep that is refused raises `ConfigError`.
    """
    command = shlex.join(["python", "-m", "rlreason", *sys.argv[1:]])
    after_run = after_run_of(announce(asked, design), design)
    work = SweepWork(
        design, partial(composed_run, asked.config_name), asked.sources(), command, after_run, asked.carried, asked.gpus
    )
    launcher = chosen_launcher(asked.overrides)
    try:
        if launcher == BASIC:
            run_sweep(work, jobs_of(asked, design).side_by_side)
        else:
            _launched(hydra, asked, work, launcher, task)
    except ConfigError:
        raise
    except BaseException:
        if (design.folder / FILE).exists():
            print_table(design.folder)
        raise
    return print_table(design.folder)


def print_table(folder: Path) -> SweepState:
    """Print a sweep's settings with the intervals and verdicts of the report, and all that is to be said with them."""
    from rlreason.report.read import read_study  # here: what only types a command need not load it
    from rlreason.report.tables import in_brief

    state = read_state(folder)
    scored = any(run.score is not None for run in state.runs)  # of discovery, which has a report of its own
    print("\n" + closing(state, folder, {} if scored else in_brief(read_study([folder]))), flush=True)
    return state


def _launched(hydra: Hydra, asked: Asked, work: SweepWork, launcher: str, task: Task) -> None:
    """Run a sweep by one of Hydra's launchers."""
    design = work.design
    jobs = jobs_of(asked, design)
    words = [*design.runs[0].overrides, *words_of_launcher(asked), *jobs.words]
    if launcher in (SLURM, RAY):
        settings = settings_of(hydra, asked.config_name, words, design.folder)
        place = design.folder / f".{launcher}"
        cluster = SlurmCluster(place, settings) if launcher == SLURM else RayCluster(settings, jobs.gpus)
        run_elsewhere(work, cluster, place, jobs.side_by_side)
        return
    start = launcher_of(hydra, asked.config_name, words, design.folder, task)

    def launch(runs: Sequence[PlannedRun]) -> Sequence[Exception | None]:
        return start([(run.name, run.overrides) for run in runs])

    launch_sweep(work, launcher, launch, jobs.side_by_side, jobs.batch, jobs.shows_gpus)


def composed_run(config_name: str, run: PlannedRun) -> Composed:
    """The config of a run of a sweep, as the run will write it. Hydra must be ready to compose."""
    cfg = compose(config_name, list(run.overrides))
    asked = typed(cfg, of_sweep=True)
    may_fork = (
        works_on_a_model(asked) and asked.rollout.engine != "vllm"
    )  # which decides as it is loaded how it uses the processors
    config = redacted(OmegaConf.to_yaml(cfg, resolve=True))
    return Composed(config, asked.waits.run_s, gpus_needed(asked), may_fork)


def start_sweep_run(cfg: DictConfig) -> float:
    """One job of a launcher or a sweeper: a run in a process of its own; returns the accuracy, which a sweeper such as
    Optuna's goes by.
    """
    register()  # a launcher's process has loaded this program alone
    run = typed(cfg, of_sweep=True)
    config, hydra_config = redacted(OmegaConf.to_yaml(cfg, resolve=True)), HydraConfig.get()
    folder, name = Path(hydra_config.runtime.output_dir), Path(hydra_config.sweep.dir).name
    composed = Composed(config, run.waits.run_s, gpus_needed(run))
    return Sweep.of_environment().run(name, folder, list(hydra_config.overrides.task), composed).accuracy


def start_drawn_sweep(hydra: Hydra, asked: Asked, task: Task) -> int:
    """A sweep whose sweeper draws the values of its runs one after the other: nobody knows them all beforehand."""
    with signals.temporary_folder("rlreason-sweep-") as place:
        gpus, per_run = asked.gpus.handed_out, asked.gpus.per_run
        log = Sweep(asked.sources(), str(Path(place) / LOG), gpus=gpus, gpus_per_run=per_run, locks=place)
        log.announce()
        try:
            hydra.multirun(asked.config_name, task, [*asked.overrides, "hydra.mode=MULTIRUN"])
        finally:
            runs = log.runs()
            if runs:
                print("\n" + runs_table(runs))
    if not runs:  # a launcher on machines that share no files with this one
        print("rlreason: no run of the sweep has reported here how it ended: see their folders", file=sys.stderr)
        return 1
    return sweep_code([run.status for run in runs])
