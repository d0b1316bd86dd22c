"""Activation checkpointing: less memory in training, for computing each layer's activations a second time."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.errors import ConfigError


def checkpoint_layers(model: nn.Module) -> str:
    """Keep only each layer's input in the forward pass; the backward pass computes the rest again.

    The layers' own switch for this acts in training mode only, which would turn dropout on and the cache off. This
    one acts whenever gradients are recorded, so scoring and sampling are not affected. The model is changed in place.
    Returns a line on what was done; `ConfigError` where the model's layers do not support it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing=true: {type(model).__name__} does not mark its layers as ones that can be "
            "computed again: set it to false, or choose another model"
        )
    for layer in layers:
        # not a closure: deepcopy would leave it as it is, bound to the old layer; no random state: dropout is off
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return f"activations of {len(layers)} layers are computed again for the gradient"
