"""What makes a model need less memory in training: recomputed activations, half-precision weights, frozen weights.

Each function changes a model in place and returns what it did, in words. It must not know losses, optimizers,
tokenizers or configuration files.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.errors import ConfigError


def recompute_layers(model: nn.Module) -> str:
    """Keep only each layer's input on the way forward; the rest is computed again on the way back.

    The layers' own switch for this acts in training mode only, which would turn dropout on and the cache off. This
    one acts whenever gradients are recorded, so scoring and sampling never notice it.
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


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep the weights in `dtype`, but the output head (and embeddings tied to it) as it is: logits stay exact.

    Buffers keep their precision too: rounded rotary frequencies would move far positions.
    """
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        if parameter is not head:
            parameter.data = parameter.data.to(dtype)


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> str:
    """Leave the parameters whose names match a pattern as they are. Tied weights have two names and one fate."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name in matching(named, patterns, "model.freeze"):
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze={list(patterns)} leaves nothing to train: name fewer parameters")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tied = head is embedding and not head.requires_grad
    return "frozen weights: " + trained_share(model) + (", output head = embeddings: both frozen" if tied else "")


def trained_share(model: nn.Module) -> str:
    """How much of a model an optimizer would change, for a person. The model's size does not count its adapters.

    >>> layer = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    >>> trained_share(nn.Sequential(layer, nn.Linear(1000, 3000, bias=False)))
    '3 M of 4 M parameters are trained'
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{trained / 1e6:.3g} M of {model_size(model) / 1e6:.3g} M parameters are trained"


def model_size(model: nn.Module) -> int:
    """Parameters of a model without its adapters; tied ones once."""
    return sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)


def matching(names: Iterable[str], patterns: Sequence[str], setting: str) -> list[str]:
    """Names that a shell pattern matches whole, or from a dot on. A pattern that matches none is a mistake.

    >>> matching(["a.0.q_proj", "a.0.v_proj", "a.1.q_proj"], ["q_proj", "a.0.*"], "model.freeze")
    ['a.0.q_proj', 'a.0.v_proj', 'a.1.q_proj']
    """
    names, hits = list(names), set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not found:
            near = get_close_matches(pattern, {*names, *(n.rpartition(".")[2] for n in names)}, n=3, cutoff=0.4)
            raise ConfigError(
                f"{setting}: {pattern} matches no name in this model: try "
                + (", ".join(near) if near else f"one such as {names[0]}")
            )
        hits |= found
    return [name for name in names if name in hits]
