"""The config group `model`: what is trained, and how it fits into memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlreason.config import conflicts
from rlreason.settings import MADE, MAX_SEED, Settings, choice, group, number, share, source, text

#: Prompt options that share one warm start of the built-in model, so that an ablation starts from equal weights.
SHARED_WARM_START = ("r1_zero", "question_only", "question_boxed", "r1_zero_three_shot")
TINY_CONTEXT = 512  # positions of the built-in model, for prompt and response together


def type_of_head(head: str, engine: str, products: str) -> str:
    """Return the dtype of the output head's operands, given `model.head`, `rollout.engine` and the dtype of products.

    vLLM keeps its head's weights in the type of its products and sums in float32 (0.32, logits_processor.py; on a
    processor it converts the rounded numbers). The in-process engine samples with the trainer's own head.

    >>> type_of_head("auto", "vllm", "bfloat16"), type_of_head("auto", "hf", "bfloat16")
    ('bfloat16', 'float32')
    """
    if head == "auto":
        return products if engine == "vllm" else "float32"
    return head


@dataclass
class WarmStartConfig:
    """The short SFT that gives the built-in model its habits. `steps=0` leaves it out."""

    steps: int = number(700, high=MADE, doc="optimizer steps; 0: the model stays random")
    batch_size: int = number(64, low=1, high=2**16, doc="traces per optimizer step", only_if="here.steps > 0")
    learning_rate: float = number(3e-3, above=0, high=1e30, doc="its highest rate", only_if="here.steps > 0")
    hasty_share: float | None = share(None, doc="null: data.habits.hasty_share", only_if="here.steps > 0")
    slip_share: float | None = share(None, doc="null: data.habits.slip_share", only_if="here.steps > 0")


@dataclass
class LoRAConfig:
    """Low-rank adapters: the model's own weights stay as they are. Needs peft. They have no dropout."""

    rank: int = number(0, high=2**16, doc="of the adapters; 0: none, every weight is trained", only_if="trains")
    alpha: float = number(32.0, above=0, doc="output is scaled by alpha / rank", only_if="trains and here.rank > 0")
    targets: list[str] | None = text(
        None, doc="patterns on layers, as [q_proj,v_proj]; null: all but the head", only_if="trains and here.rank > 0"
    )


@dataclass
class ModelConfig(Settings):
    """What is trained, and how it fits into memory; first the settings of every model."""

    rules = conflicts.of_model
    made_on_the_spot: ClassVar[bool] = False  # whether it is the built-in tiny model, which has no files
    folder: ClassVar[Any] = None  # where the weights are; None for the built-in model
    context: ClassVar[int | None] = None  # positions for prompt and response together, where its class says so

    name: str = text(doc="of the option, for records")
    dtype: str = choice("auto | float32 | bfloat16", doc="of matrix products; auto: bfloat16 on a GPU, else float32")
    head: str = choice(
        "auto | float32 | bfloat16",
        doc="number type of the output head's operands, rounded for the product only; all that follows is float32. "
        "auto: as in the engine's head, bfloat16 with vLLM in bfloat16, else float32",
    )
    weights: str = choice(
        "float32 | bfloat16", doc="their number type; bfloat16: half the memory, but small updates are rounded away"
    )
    attention: str = choice(
        "auto | sdpa | varlen | flash_attention_2",
        doc="kernel over packed sequences; a run's header says which auto took, and why",
    )
    gradient_checkpointing: bool = text(False, doc="recomputes activations: less memory, more work", only_if="trains")
    check_memory: bool = text(True, doc="refuse a run that certainly needs more memory than its GPU has")
    freeze: list[str] = text([], doc="patterns on names of weights that are not trained", only_if="trains")
    lora: LoRAConfig = group(LoRAConfig)


@dataclass
class TinyModelConfig(ModelConfig):
    """The built-in model, made here and taught habits by a warm start: those of the stories."""

    rules = conflicts.of_tiny_model
    made_on_the_spot: ClassVar[bool] = True
    context: ClassVar[int | None] = TINY_CONTEXT

    width: int = number(128, low=1, high=1024, doc="numbers per token, a multiple of 2 x heads")
    layers: int = number(2, low=1, high=32, doc="transformer blocks")
    heads: int = number(4, low=1, high=64, doc="attention heads per block")
    seed: int = number(0, high=MAX_SEED, doc="of weights and warm start; not `seed`, so that compared runs start alike")
    cache: str | None = text(
        "auto", doc="auto: ~/.cache/rlreason; a folder; null: made anew each time", only_if="here.warm_start.steps > 0"
    )
    warm_start: WarmStartConfig = group(WarmStartConfig)


@dataclass
class PretrainedModelConfig(ModelConfig):
    """A model in transformers' format."""

    rules = conflicts.of_pretrained_model

    path: str = source(doc="a model folder, the folder of a run that left one, or a hub name")

    @property
    def folder(self) -> str:
        """Where the weights are: in a run's folder, its `model/`."""
        path = Path(self.path).expanduser()
        left_by_run = not (path / "config.json").is_file() and (path / "model" / "config.json").is_file()
        return str(path / "model" if left_by_run else path) if path.is_dir() else self.path
