"""What can be wrong with a run before anything slow is loaded: templates, packages, functions of the user's own, disk.

Every check ends in one line with its cure. No torch is imported for it, so that an answer comes within a second or
two.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlreason.config.data import DataConfig
from rlreason.config.evaluation import as_eval
from rlreason.config.groups import PromptConfig
from rlreason.config.packages import needs
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.config.run import RunConfig
from rlreason.config.tasks import GymConfig
from rlreason.errors import ConfigError, ResourceError
from rlreason.records.wandb_logger import refuse_without_login
from rlreason.setup.fits import Foreseen
from rlreason.setup.probe import judged_by, own_functions, unusable
from rlreason.setup.space import RECORDS, in_words, space_needed
from rlreason.setup.templates import template_of


class Needed(NamedTuple):
    """A package that only some runs need: which, in which runs, and what of their settings asks for it."""

    package: str
    by: Callable[[RunConfig], bool]
    asked: Callable[[RunConfig], str]


def _of_which(run: RunConfig, kind: Callable[[DataConfig], bool]) -> tuple[str, DataConfig]:
    """The first data set of a kind that a run reads, with the setting that it stands under."""
    return next((key, data) for key, data in run.data_read().items() if kind(data))


def _on_hub(data: DataConfig) -> bool:
    return data.on_hub


def _made_up_by_gym(data: DataConfig) -> bool:
    return isinstance(data, GymConfig)


NEEDED = (
    Needed(
        "peft",
        lambda run: run.trains and run.model.lora.rank > 0,
        lambda run: f"model.lora.rank={run.model.lora.rank}",
    ),
    Needed("bitsandbytes", lambda run: run.optimizes_by == "adamw_8bit", lambda run: "optimizer=adamw_8bit"),
    Needed(
        "datasets",
        lambda run: any(map(_on_hub, run.data_read().values())),
        lambda run: "{}.path={.path} is no folder here, and reading it from the hub".format(*_of_which(run, _on_hub)),
    ),
    Needed(
        "reasoning_gym",
        lambda run: any(map(_made_up_by_gym, run.data_read().values())),
        lambda run: "{}={.name}".format(*_of_which(run, _made_up_by_gym)),
    ),
    Needed("wandb", lambda run: run.logger.kind == "wandb", lambda run: "logger=wandb"),
)


def preflight(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse runs that could not begin, the runs of a sweep together; returns what is to be said all the same.

    `folder` is where they will write; it need not be there yet.
    """
    bad = [line for run in runs for line in (*template_problems(run), *missing_packages(run))]
    foreseen = None if bad else Foreseen()
    bad += useless_functions(runs, foreseen)
    if foreseen and not bad:
        bad = [line for run in runs if (line := foreseen.too_long(run))]
    if bad:
        raise ConfigError("\n".join(dict.fromkeys(bad)))
    for run in runs:
        if run.logger.kind == "wandb":
            refuse_without_login(run.logger)
    return room_for(runs, folder)


def useless_functions(runs: Sequence[RunConfig], foreseen: Foreseen | None) -> list[str]:
    """Why functions of the user's own cannot be had or cannot judge, each tried once for all runs."""
    found: dict[tuple[str, str], str] = {}
    for run in runs:
        for setting, name in own_functions(run):
            if (setting, name) in found:
                continue
            loaded = foreseen.problems(run) if foreseen and not setting.startswith("scorer=") else None
            judged = [] if loaded is None else judged_by(run, name, loaded.train, loaded.validation)
            found[setting, name] = unusable(setting, name, run.grading, judged[0].answer if judged else None)
    return [line for line in found.values() if line]


def template_problems(run: RunConfig) -> list[str]:
    """What is wrong with the templates of the prompts."""
    own = run.eval.prompt
    bad = [_unusable(run.prompt), *([] if own is None else [as_eval("prompt", _unusable(own), own)])]
    return [line for line in bad if line]


def _unusable(prompt: PromptConfig) -> str:
    try:
        template_of(prompt)
    except ConfigError as error:
        return str(error)
    return ""


def missing_packages(run: RunConfig) -> list[str]:
    """Packages that the settings ask for and that are not installed. Nothing is imported."""
    bad = [WITHOUT_VLLM] if run.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None else []
    missing = [n for n in NEEDED if n.by(run) and importlib.util.find_spec(n.package) is None]
    return bad + [needs(n.asked(run), n.package) for n in missing]


def room_for(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse what surely does not fit on the disk; returns what may not fit, as text."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needs = shutil.disk_usage(place).free, [space_needed(run) for run in runs]
    models, responses = sum(need.model for need in needs), sum(need.responses for need in needs)
    surely = models + RECORDS * len(runs)
    cure = "free some space, or choose another hydra.run.dir"
    if free < surely:
        without = ", or set save_model=false" if free > RECORDS * len(runs) and models else ""
        raise ResourceError(
            f"{place} has {in_words(free)} free, and this writes at least {in_words(surely)}: {cure}{without}"
        )
    if free < surely + responses:
        return [f"{place} has {in_words(free)} free, and this may write {in_words(surely + responses)}: {cure}"]
    return []
