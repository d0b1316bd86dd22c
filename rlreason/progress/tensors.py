"""The tensors that a run goes on with, apart from its model's weights: moments and adapters, beside random states.

By name, as safetensors holds them; what is no tensor goes into plain values.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlreason.errors import ConfigError
from rlreason.learner import Learner
from rlreason.model.policy import Policy
from rlreason.records.files import MODEL, SPREAD, TENSORS
from rlreason.records.files import MOMENTS as MOMENTS_FILE
from rlreason.runtime.atomic_files import explained

Plain = dict[str, Any]
MOMENTS, WEIGHTS = "optimizer.", "weight."


def moments(learner: Learner) -> tuple[list[Plain], dict[str, Tensor]]:
    """What the optimizer keeps of each trained parameter, in their order: plain values, and tensors by name.

    Those that are spread over ranks are left out: the learner writes them.
    """
    plain: list[Plain] = []
    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(learner.parameters):
        kept = learner.optimizer.state.get(parameter, {})
        plain.append({name: value for name, value in kept.items() if not isinstance(value, Tensor)})
        whole = {name: v for name, v in kept.items() if isinstance(v, Tensor) and not hasattr(v, "to_local")}
        tensors |= {f"{MOMENTS}{i}.{name}": value for name, value in whole.items()}
    return plain, tensors


def set_moments(learner: Learner, plain: list[Plain], tensors: dict[str, Tensor]) -> None:
    """Give the optimizer what `moments` took from it; new moments where a finished run has kept none."""
    there = any(name.startswith(MOMENTS) for name in tensors)
    found: list[Plain] = [dict(kept) if there else {} for kept in plain]
    for name, tensor in tensors.items():
        if name.startswith(MOMENTS):
            number, _, key = name.removeprefix(MOMENTS).partition(".")
            found[int(number)][key] = tensor
    learner.restore(found)


def adapters(policy: Policy) -> dict[str, Tensor]:
    """Trained weights that a saved model folder holds merged into others, by name: those of LoRA."""
    named = policy.model.named_parameters()
    return {f"{WEIGHTS}{name}": p.detach() for name, p in named if p.requires_grad and ".lora_" in name}


def write_tensors(folder: Path, policy: Policy, tensors: dict[str, Tensor]) -> None:
    """`model/` and the tensors in the folder of a checkpoint."""
    policy.save(folder / MODEL)
    stored: set[int] = set()
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}, MOMENTS_FILE: {}}
    for name, tensor in tensors.items():  # safetensors takes no two that share memory
        tensor = tensor.detach().cpu().contiguous()
        apart = files[MOMENTS_FILE if name.startswith(MOMENTS) else TENSORS]
        apart[name] = tensor.clone() if tensor.data_ptr() in stored else tensor
        stored.add(tensor.data_ptr())
    for file, apart in files.items():
        if apart or file == TENSORS:
            with explained(folder / file):
                save_file(apart, folder / file)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without the model's."""
    tensors = load_file(folder / TENSORS)
    if (folder / MOMENTS_FILE).is_file():
        tensors |= load_file(folder / MOMENTS_FILE)
    if (folder / SPREAD / ".metadata").is_file():
        from rlreason.distributed.moments import read_whole  # what a run of one process need not load

        tensors |= {f"{MOMENTS}{name}": tensor for name, tensor in read_whole(folder / SPREAD).items()}
    return tensors


def set_weights(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Give the policy the weights of a checkpoint: its adapters, or else every weight of its model folder."""
    if own := adapters(policy):
        with torch.no_grad():
            for name, live in own.items():
                live.copy_(tensors[name])
        return
    saved: dict[str, Tensor] = {}
    for file in sorted((folder / MODEL).glob("*.safetensors")):
        saved |= load_file(file)
    with torch.no_grad():
        for name, live in policy.named_weights():
            if name not in saved or saved[name].shape != live.shape:
                raise ConfigError(f"{folder / MODEL} lacks the weight {name} of this model: choose another folder")
            live.copy_(saved[name])
