"""Low-rank adapters (LoRA) through `peft`: put them into a model, and merge them into its weights."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlreason.config.packages import required
from rlreason.errors import ConfigError
from rlreason.model.alone import alone
from rlreason.model.parameters import describe_trained, matching_names

BASE = ".base_layer."  # what peft puts between a wrapped layer's name and its own weights' names


def add_lora(model: PreTrainedModel, rank: int, alpha: float, targets: Sequence[str] | None, seed: int) -> str:
    """Freeze the model and put a trainable pair A (rank, in), B (out, rank) next to each chosen linear layer.

        y = W x + (alpha / rank) B A x,    B = 0 at first, so the model starts as it is

    (Hu et al. 2021, arXiv:2106.09685). The layers are wrapped in place, so the model is called as before.
    `targets` are patterns on layer names; None takes every linear layer but the output head. A and B are float32
    whatever the model's weights are. Returns a line on what was done.
    """
    with required("model.lora.rank above 0", "peft"):
        from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    if not linear:
        raise ConfigError(f"model.lora.rank={rank}: {type(model).__name__} has no linear layers to adapt: set it to 0")
    chosen = matching_names(linear, ["*"] if targets is None else targets, "model.lora.targets")
    # Any alpha scales, whatever the annotation says.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0, bias="none")  # type: ignore[arg-type]
    with alone(seed):
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return f"LoRA rank {rank}: {describe_trained(model)}"


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight and saved buffer of the model without its adapters.

        W' = W + (alpha / rank) B A

    for an adapted layer, computed one at a time as the iterator advances. Tied weights come once, under
    the first of their names, which is the one that transformers saves.
    """
    layers = dict(model.named_modules())
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or ".lora_" in name:
            continue
        seen.add(id(tensor))
        weight = tensor.detach()
        if name.endswith(BASE + "weight"):
            layer = layers[name.removesuffix(BASE + "weight")]
            for adapter in layer.active_adapters:  # type: ignore[union-attr]
                weight = (weight + layer.get_delta_weight(adapter).detach()).to(weight.dtype)  # type: ignore[operator]
        yield name.replace(BASE, ".").replace("_orig_mod.", ""), weight
