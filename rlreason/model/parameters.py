"""Which parameters of a model are trained and in what precision they are kept, by patterns on their names."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlreason.errors import ConfigError


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep the weights in `dtype`, but the output head (and embeddings tied to it) as it is: logits stay exact.

    The model is changed in place. Buffers keep their precision: rounded rotary frequencies would move far positions.
    """
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        if parameter is not head:
            parameter.data = parameter.data.to(dtype)


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> str:
    """Do not train the parameters whose names match a pattern; tied weights are frozen under either of their names.

    The model is changed in place. Returns a line on what is still trained; `ConfigError` where that is nothing.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name in matching_names(named, patterns, "model.freeze"):
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze={list(patterns)} leaves nothing to train: name fewer parameters")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tied = head is embedding and not head.requires_grad
    return "frozen weights: " + describe_trained(model) + (", output head = embeddings: both frozen" if tied else "")


def describe_trained(model: nn.Module) -> str:
    """A line on how many parameters an optimizer would change; the model's size does not count its adapters.

    >>> layer = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    >>> describe_trained(nn.Sequential(layer, nn.Linear(1000, 3000, bias=False)))
    '3 M of 4 M parameters are trained'
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{trained / 1e6:.3g} M of {model_size(model) / 1e6:.3g} M parameters are trained"


def model_size(model: nn.Module) -> int:
    """Parameters of a model without its adapters; tied ones once."""
    return sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)


def matching_names(names: Iterable[str], patterns: Sequence[str], setting: str) -> list[str]:
    """The names that a shell pattern matches as a whole or from a dot on, in their order.

    A pattern that matches none is a `ConfigError`, which names `setting` and the nearest names.

    >>> matching_names(["a.0.q_proj", "a.0.v_proj", "a.1.q_proj"], ["q_proj", "a.0.*"], "model.freeze")
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
