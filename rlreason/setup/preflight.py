"""What can be wrong with a run before anything slow is loaded: templates, packages, functions of the user's own, disk.

Every check ends in one line with its cure. It knows settings, files and the grader's processes; it must not import
torch, so that an answer comes within a second or two.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlreason.config.conditions import lies_on_hub
from rlreason.config.data import DataConfig, FileDataConfig
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.tasks import CountdownConfig, GymConfig
from rlreason.config.uses import data_read
from rlreason.data.files import locate, may_be_hub_name
from rlreason.errors import ConfigError, ResourceError
from rlreason.records.wandb_logger import refuse_without_login
from rlreason.setup.fits import Foreseen
from rlreason.setup.probe import judged_by, own_functions, unusable
from rlreason.setup.space import RECORDS, in_words, space_needed
from rlreason.setup.templates import template_of


class Needed(NamedTuple):
    """A package that only some runs need: which, and how to get it or do without."""

    package: str
    by: Callable[[RunConfig], bool]
    cure: Callable[[RunConfig], str]


def _adapts(run: RunConfig) -> bool:
    return isinstance(run, TrainingConfig) and run.model.lora.rank > 0


def _on_hub(data: DataConfig) -> bool:
    if isinstance(data, FileDataConfig):
        return lies_on_hub(data)
    path = data.path if isinstance(data, CountdownConfig) else None
    return path is not None and not locate(None, path) and may_be_hub_name(path)


def _made_up_by_gym(data: DataConfig) -> bool:
    return isinstance(data, GymConfig)


def _of_which(run: RunConfig, kind: Callable[[DataConfig], bool]) -> tuple[str, DataConfig]:
    """The first data set of a kind that a run reads, with the setting that it stands under."""
    return next((key, data) for key, data in data_read(run).items() if kind(data))


NEEDED = (
    Needed(
        "vllm",
        lambda run: run.rollout.engine == "vllm",
        lambda run: WITHOUT_VLLM,
    ),
    Needed(
        "peft",
        _adapts,
        lambda run: (
            f"model.lora.rank={run.model.lora.rank} needs the peft library: pip install 'rlreason[lora]', or set it "
            "to 0"
        ),
    ),
    Needed(
        "bitsandbytes",
        lambda run: getattr(run, "optimizer", "") == "adamw_8bit",
        lambda run: (
            "optimizer=adamw_8bit needs the bitsandbytes library: pip install 'rlreason[8bit]', or set optimizer=adamw"
        ),
    ),
    Needed(
        "datasets",
        lambda run: any(map(_on_hub, data_read(run).values())),
        lambda run: (
            "{}.path={.path} is no folder here, and reading it from the hub needs the datasets package: pip install "
            "'rlreason[hub]', or give a folder with train.jsonl and test.jsonl"
        ).format(*_of_which(run, _on_hub)),
    ),
    Needed(
        "reasoning_gym",
        lambda run: any(map(_made_up_by_gym, data_read(run).values())),
        lambda run: "{}={.name} needs the reasoning-gym package: pip install 'rlreason[gym]'".format(
            *_of_which(run, _made_up_by_gym)
        ),
    ),
    Needed(
        "wandb",
        lambda run: run.logger.kind == "wandb",
        lambda run: "logger=wandb needs the wandb package: pip install wandb, or choose logger=none",
    ),
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
    prompts = {"prompt": run.prompt} | ({"eval.prompt": run.eval.prompt} if run.eval.prompt else {})
    bad = []
    for key, prompt in prompts.items():
        try:
            template_of(prompt)
        except ConfigError as error:
            bad.append(str(error).replace("prompt.file", f"{key}.file", 1))
        except (OSError, ValueError) as error:  # no permission, no UTF-8
            bad.append(f"{key}.file={prompt.file} cannot be read ({error}): give a text file in UTF-8")
    return bad


def missing_packages(run: RunConfig) -> list[str]:
    """Packages that the settings ask for and that are not installed. Nothing is imported."""
    return [n.cure(run) for n in NEEDED if n.by(run) and importlib.util.find_spec(n.package) is None]


def room_for(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse what surely does not fit on the disk; returns what may not fit, in words."""
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
