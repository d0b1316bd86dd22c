"""What a sweep says before its first run, and what it looks at after each: see `sweeps.plan` and `sweeps.dominated`."""

from collections.abc import Callable
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from rlreason.cli.flags import Asked
from rlreason.cli.launchers import HERE, Jobs, chosen_launcher, set_up
from rlreason.config.any_run import AnyRunConfig
from rlreason.config.run import works_on_a_model
from rlreason.config.store import typed
from rlreason.sweeps.carry import in_words
from rlreason.sweeps.design import Design, PlannedRun
from rlreason.sweeps.dominated import watch
from rlreason.sweeps.plan import one_formula, plan_text
from rlreason.sweeps.state import SweepState

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
    of_each = {in_words(run.setting): run for run in reversed(design.runs)}
    return {name: run_of(asked, of_each[name]) for name in map(in_words, design.settings())}


def first_run(asked: Asked, design: Design) -> AnyRunConfig:
    """The settings of a sweep's first run."""
    return run_of(asked, design.runs[0])


def run_of(asked: Asked, run: PlannedRun) -> AnyRunConfig:
    """The settings of a planned run."""
    cfg = compose(asked.config_name, list(run.words))
    OmegaConf.resolve(cfg)
    return typed(cfg, of_sweep=True, absent=[] if asked.own.dry else None)  # said when they were checked


def space_of(run: AnyRunConfig) -> float:
    """Bytes that a run may leave, by its settings: model, responses, checkpoints and small files."""
    from rlreason.setup.space import RECORDS, space_needed  # it knows the tiny model's tokenizer, which takes a while

    return float(RECORDS + (space_needed(run).left if works_on_a_model(run) else 0))


def after_run_of(run: AnyRunConfig, design: Design) -> Callable[[SweepState], list[dict[str, Any]]] | None:
    """What the sweep asks after each run: which settings to stop; None where `monitors.dominated` is off.

    `run`: the settings of one of its runs.
    """
    watched = works_on_a_model(run) and run.monitors.dominated == "stop"
    return watch(design.folder) if watched else None
