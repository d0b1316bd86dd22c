"""The learner of a run, in this process alone or on several ranks."""

from pathlib import Path
from typing import Any

import torch

from rlreason.config.training import TrainingConfig
from rlreason.distributed.place import place_of, world_of
from rlreason.learner import Learner
from rlreason.model.policy import Policy
from rlreason.setup.learner_settings import settings_of


def make_learner(run: TrainingConfig, policy: Policy, folder: Path | None = None, algorithm: Any = None) -> Learner:
    """The learner that the run's objective and its settings of optimisation ask for.

    `folder`: of a run that trains, and may do so on several ranks, which then score under the reference model of the
    `algorithm` together. Without one it is for this process alone.
    """
    if folder is not None and (world := world_of(run.gpus, place_of(), torch.cuda.device_count())) > 1:
        from rlreason.setup.ranks import lead  # what one process has no use for takes half a second to load

        return lead(run, policy, getattr(algorithm, "reference", None), world, folder)
    sampling = (run.rollout.gpus, run.rollout.placement) if run.rollout.engine == "vllm" else (1, "auto")
    if idle := unused(torch.cuda.device_count(), *sampling):
        policy.remarks.append(f"{idle} more here (gpus=N trains on several, docs/scale.md)")
    return Learner(policy, **settings_of(run))


def unused(visible: int, engines: int, placement: str) -> str:
    """The visible GPUs that a run of one rank leaves idle, in words; "" where there are none.

    >>> unused(8, 1, "auto"), unused(2, 1, "second_gpu"), unused(2, 1, "colocate")
    ('7 GPUs', '', '1 GPU')
    """
    count = visible - (1 + engines if placement == "second_gpu" else max(1, engines))
    return f"{count} GPU{'s' * (count > 1)}" if count > 0 else ""
