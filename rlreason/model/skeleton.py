"""Models without numbers, or of one layer: what stands for a model that is too large to be whole in a place."""

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rlreason.model.alone import alone
from rlreason.model.lora import merged_weights


def from_config(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this architecture, float32, on the processor, to be filled: its weights are what lay in memory."""
    own = copy.deepcopy(config)  # which remembers how a model was made
    with alone(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation="sdpa")
    model.tie_weights()
    model.eval()
    return model


def skeleton_of(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this architecture that takes no memory: it has shapes, and no numbers."""
    with torch.device("meta"):
        return from_config(config)


def one_layer_of(config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture with its first layer alone."""
    found = copy.deepcopy(config)
    found.num_hidden_layers = 1
    if getattr(found, "layer_types", None):
        found.layer_types = found.layer_types[:1]
    return found


def with_one_layer(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's first layer, between its embeddings and its output head."""
    short = from_config(one_layer_of(model.config))
    wanted = short.state_dict()
    short.load_state_dict({name: w for name, w in merged_weights(model) if name in wanted}, strict=False)  # tied ones
    return short


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give what has no numbers memory on the device, in place; what is tied stays so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old.is_meta:
                if old not in made:
                    made[old] = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
                part._parameters[name] = made[old]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)
