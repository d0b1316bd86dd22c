"""What can be wrong with a run before anything slow is loaded: templates, packages, functions of the user's own, disk.

Every check ends in one line with its cure. No torch is imported for it, so that an answer comes within a second or
two.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rlreason.config.evaluation import as_eval
from rlreason.config.groups import PromptConfig
from rlreason.config.packages import needs
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.config.run import RunConfig
from rlreason.config.tasks import GymConfig
from rlreason.errors import ConfigError, ResourceError
from rlreason.memory.machine import believed_device
from rlreason.objectives.objective import ChosenLoss
from rlreason.objectives.own_loss import broken_contract
from rlreason.runtime.environment import SWEEP_VARIABLE
from rlreason.setup.fits import Foreseen
from rlreason.setup.memory import memory_for
from rlreason.setup.placement import engine_gpus
from rlreason.setup.probe import judged_by, own_functions, unusable
from rlreason.setup.space import RECORDS, in_words, space_needed
from rlreason.setup.templates import template_of


def needed_by(run: RunConfig) -> Iterator[tuple[str, str]]:
    """(package, what of the settings asks for it) of the packages that only some runs need."""
    data_read = run.data_read().items()
    if run.trains and run.model.lora.rank > 0:
        yield "peft", f"model.lora.rank={run.model.lora.rank}"
    if run.optimizes_by == "adamw_8bit":
        yield "bitsandbytes", "optimizer=adamw_8bit"
    for found in [found for found in data_read if found[1].on_hub][:1]:
        yield "datasets", "{}.path={.path} is no folder here, and reading it from the hub".format(*found)
    for found in [found for found in data_read if isinstance(found[1], GymConfig)][:1]:
        yield "reasoning_gym", "{}={.name}".format(*found)
    for name in run.logger.chosen:
        yield name, f"logger={name}"


def preflight(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse runs that could not begin, the runs of a sweep together; returns what is to be said all the same.

    `folder` is where they will write; it need not be there yet.
    """
    bad = [line for run in runs for line in (*template_problems(run), *missing_packages(run))]
    bad += [line for run in runs if (line := broken_loss(run))]
    foreseen = None if bad else Foreseen()
    bad += useless_functions(runs, foreseen)
    if bad:
        raise ConfigError("\n".join(dict.fromkeys(bad)))
    if foreseen:
        for run in runs:
            foreseen.problems(run)  # a mistake in its data is an error
    return room_for(runs, folder) + memory_for(runs, believed_device(), SWEEP_VARIABLE not in os.environ)


def seen_from_here(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """What would stop these runs on this machine, where they are only planned: nothing is refused, and no data read."""
    said = [line for run in runs for line in (*template_problems(run), *missing_packages(run))]
    for look in (partial(room_for, runs, folder), partial(memory_for, runs, believed_device(), False)):
        try:
            said += look()
        except (ConfigError, OSError) as error:
            said.append(str(error))
    return said


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


def broken_loss(run: RunConfig) -> str:
    """Why a loss of the user's own cannot be trained with."""
    loss: ChosenLoss | None = getattr(run, "loss", None)
    return broken_contract(loss.loss_type, loss.numbers()) if loss and run.own_loss else ""


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
    return bad + [needs(asked, name) for name, asked in needed_by(run) if importlib.util.find_spec(name) is None]


def too_few_gpus(placement: str, gpus: int, engines: int = 1, ranks: int = 1) -> str:
    """Why vLLM's engines cannot have the GPUs that they ask for where so many are visible; empty where they can.

    >>> too_few_gpus("second_gpu", 2), too_few_gpus("auto", 0), too_few_gpus("colocate", 4, engines=4, ranks=4)
    ('', '', '')
    """
    try:
        engine_gpus(placement, engines, ranks, gpus)
    except ConfigError as error:
        return str(error)
    return ""


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
    checkpoints = sum(need.kept for need in needs) + max((need.checkpoints - need.kept for need in needs), default=0)
    if free < (may := surely + responses + checkpoints):
        fewer = ", or set checkpoint.keep=1" if checkpoints > responses else ""
        return [f"{place} has {in_words(free)} free, and this may write {in_words(may)}: {cure}{fewer}"]
    return []
