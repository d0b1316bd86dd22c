"""What can be wrong with a run before anything slow is loaded: templates, packages, functions of the user's own, disk.

Every check ends in one line with its cure. It knows settings, files and the grader's processes; it must not import
torch, so that an answer comes within a second or two.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlreason.config.conditions import asks_hub
from rlreason.config.data import FileData
from rlreason.config.jobs import BestOfN
from rlreason.config.rollout import INSTALL_VLLM
from rlreason.config.run import Run, Training
from rlreason.config.store import resource_dir
from rlreason.config.tasks import Countdown, Gym
from rlreason.config.uses import judges
from rlreason.data.files import locate, may_be_hub_name
from rlreason.errors import ConfigError, ResourceError
from rlreason.grading.pool import Pool
from rlreason.grading.verifiers import reward_name
from rlreason.mirror import refuse_without_login
from rlreason.prompts import load_template
from rlreason.setup.space import RECORDS, in_words, space_needed


class Needed(NamedTuple):
    """A package that only some runs need: which, and how to get it or do without."""

    package: str
    by: Callable[[Run], bool]
    cure: Callable[[Run], str]


def _adapts(run: Run) -> bool:
    return isinstance(run, Training) and run.model.lora.rank > 0


def _reads_hub(run: Run) -> bool:
    data = run.data
    if isinstance(data, FileData):
        return asks_hub(run)
    path = data.path if isinstance(data, Countdown) else None
    return path is not None and not locate(None, path) and may_be_hub_name(path)


NEEDED = (
    Needed(
        "vllm",
        lambda run: run.rollout.engine == "vllm",
        lambda run: f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf",
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
        _reads_hub,
        lambda run: (
            f"data.path={getattr(run.data, 'path', None)} is no folder here, and reading it from the hub needs the "
            "datasets package: pip install 'rlreason[hub]', or give a folder with train.jsonl and test.jsonl"
        ),
    ),
    Needed(
        "reasoning_gym",
        lambda run: isinstance(run.data, Gym),
        lambda run: f"data={run.data.name} needs the reasoning-gym package: pip install 'rlreason[gym]'",
    ),
    Needed(
        "wandb",
        lambda run: run.logger.kind == "wandb",
        lambda run: "logger=wandb needs the wandb package: pip install wandb, or choose logger=none",
    ),
)


def preflight(runs: Sequence[Run], folder: Path) -> list[str]:
    """Refuse runs that could not begin, the runs of a sweep together; returns what is to be said all the same.

    `folder` is where they will write; it need not be there yet.
    """
    bad = [line for run in runs for line in (*template_problems(run), *missing_packages(run))]
    functions = dict.fromkeys(named for run in runs for named in own_functions(run))
    bad += [line for setting, name in functions if (line := not_importable(setting, name))]
    if bad:
        raise ConfigError("\n".join(dict.fromkeys(bad)))
    for run in runs:
        if run.logger.kind == "wandb":
            refuse_without_login(run.logger)
    return room_for(runs, folder)


def template_problems(run: Run) -> list[str]:
    """What is wrong with the templates of the prompts."""
    prompts = {"prompt": run.prompt} | ({"eval.prompt": run.eval.prompt} if run.eval.prompt else {})
    bad = []
    for key, prompt in prompts.items():
        try:
            load_template(prompt.file, resource_dir("prompts"))
        except ConfigError as error:
            bad.append(str(error).replace("prompt.file", f"{key}.file", 1))
        except (OSError, ValueError) as error:  # no permission, no UTF-8
            bad.append(f"{key}.file={prompt.file} cannot be read ({error}): give a text file in UTF-8")
    return bad


def missing_packages(run: Run) -> list[str]:
    """Packages that the settings ask for and that are not installed. Nothing is imported."""
    return [n.cure(run) for n in NEEDED if n.by(run) and importlib.util.find_spec(n.package) is None]


def own_functions(run: Run) -> list[tuple[str, str]]:
    """(the setting that names it, `module:function`) of every function that is not part of this program."""
    rewards = {"eval.reward": run.eval.reward, "prompt.reward": run.prompt.reward}
    rewards["eval.prompt.reward"] = run.eval.prompt.reward if run.eval.prompt else None
    found = []
    for reward, data in judges(run):
        if ":" in reward:  # which grades data with a verifier too
            found.append((next(f"{key}={reward}" for key, one in rewards.items() if one == reward), reward))
        elif data.verifier is not None:
            key = "data.verifier" if data is run.data else "eval.data.verifier"
            found.append((f"{key}={data.verifier}", reward_name(reward, data.verifier)))
    if isinstance(run, BestOfN) and run.scorer is not None:
        found.append((f"scorer={run.scorer}", run.scorer))
    return list(dict.fromkeys(found))


def not_importable(setting: str, name: str) -> str:
    """Why a function cannot be had, tried in a process of the grader's kind; empty where it can."""
    pool = Pool(workers=1, timeout_s=1.0, memory_mb=1536, plugin=name)
    try:
        why = pool.wait()
    finally:
        pool.close()
    return f"{setting}: {why}" if why else ""


def room_for(runs: Sequence[Run], folder: Path) -> list[str]:
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
