"""The config group `model`: what is trained, and how it fits into memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlreason.errors import Absent
from rlreason.settings import MADE, MAX_SEED, Settings, choice, count, group, number, share, text

#: Prompt options that share one warm start of the built-in model, so that an ablation starts from equal weights.
SHARED_WARM_START = ("r1_zero", "question_only", "question_boxed", "r1_zero_three_shot")
TINY_CONTEXT = 512  # positions of the built-in model, for prompt and response together


@dataclass
class WarmStartConfig:
    """The short SFT that gives the built-in model its habits. `steps=0` leaves it out."""

    steps: int = number(700, "optimizer steps; 0: the model stays random", high=MADE)
    batch_size: int = count(64, "traces per optimizer step", 2**16, only_if="here.steps > 0")
    learning_rate: float = number(3e-3, "its highest rate", above=0, high=1e30, only_if="here.steps > 0")
    hasty_share: float | None = share(None, "null: data.habits.hasty_share", only_if="here.steps > 0")
    slip_share: float | None = share(None, "null: data.habits.slip_share", only_if="here.steps > 0")


@dataclass
class LoRAConfig:
    """Low-rank adapters: the model's own weights stay as they are. Needs peft. They have no dropout."""

    rank: int = number(0, "of the adapters; 0: none, every weight is trained", high=2**16, only_if="trains")
    alpha: float = number(32.0, "output is scaled by alpha / rank", above=0, only_if="trains and here.rank > 0")
    learning_rate: float | None = number(
        None,
        "of the adapters, ten times that of full weights is usual; null: learning_rate",
        above=0,
        high=1e30,
        only_if="trains and here.rank > 0",
    )
    targets: list[str] | None = text(
        None, "patterns on layers, as [q_proj,v_proj]; null: all but the head", only_if="trains and here.rank > 0"
    )


@dataclass
class ModelConfig(Settings):
    """What is trained, and how it fits into memory; first the settings of every model."""

    made_on_the_spot = False  # whether it is the built-in tiny model, which has no files
    folder: ClassVar[Any] = None  # where the weights are; None for the built-in model
    context: ClassVar[int | None] = None  # positions for prompt and response together, where its class says so

    name: str = text(doc="of the option, for records")
    dtype: str = choice(
        "auto | float32 | bfloat16 | float16",
        "of matrix products; auto: bfloat16 on a GPU that has it, else float32; float16: for older GPUs, with a loss "
        "scale that falls when a gradient overflows",
    )
    head: str = choice(
        "auto | float32 | bfloat16",
        "number type of the output head's operands, rounded for the product only; all that follows is float32. "
        "auto: as in the engine's head, with vLLM that of the products, else float32",
    )
    weights: str = choice(
        "float32 | bfloat16", "their number type; bfloat16: half the memory, but small updates are rounded away"
    )
    attention: str = choice(
        "auto | sdpa | varlen | flash_attention_2",
        "kernel over packed sequences; a run's header says which auto took, and why",
    )
    gradient_checkpointing: bool = text(False, "recomputes activations: less memory, more work", only_if="trains")
    check_memory: bool = text(True, "refuse a run that certainly needs more memory than its GPU has")
    freeze: list[str] = text([], "patterns on names of weights that are not trained", only_if="trains")
    lora: LoRAConfig = group(LoRAConfig)

    def rules(self) -> Iterator[str]:
        """Check number types against each other, and frozen weights against adapters."""
        if self.weights == "bfloat16" and self.dtype in ("float32", "float16"):
            yield f"model.dtype={self.dtype} with model.weights=bfloat16 is no more exact: set model.weights=float32"
        if self.head == "bfloat16" and self.dtype in ("float32", "float16"):
            yield f"model.head=bfloat16 is less exact than model.dtype={self.dtype}: set model.head=auto"
        if self.freeze and self.lora.rank:
            yield f"model.freeze={list(self.freeze)} with model.lora, which freezes all weights: set model.freeze=[]"


@dataclass
class TinyModelConfig(ModelConfig):
    """The built-in model, made here and taught habits by a warm start: those of the stories."""

    made_on_the_spot = True
    context = TINY_CONTEXT

    width: int = count(128, "numbers per token, a multiple of 2 x heads", 1024)
    layers: int = count(2, "transformer blocks", 32)
    heads: int = count(4, "attention heads per block", 64)
    seed: int = number(0, "of weights and warm start; not `seed`, so that compared runs start alike", high=MAX_SEED)
    cache: str | None = text(
        "auto", "auto: ~/.cache/rlreason; a folder; null: made anew each time", only_if="here.warm_start.steps > 0"
    )
    warm_start: WarmStartConfig = group(WarmStartConfig)

    def rules(self) -> Iterator[str]:
        """Check the width of the heads."""
        if self.heads > 0 and self.width % (2 * self.heads):
            yield f"model.width={self.width} must be a multiple of 2 x model.heads={self.heads}: try 128 and 4"


@dataclass
class PretrainedModelConfig(ModelConfig):
    """A model in transformers' format."""

    path: str = text(doc="a model folder, the folder of a run that left one, or a hub name")

    def rules(self) -> Iterator[str]:
        """Check that a local path is the folder of a model."""
        looks_local = self.name == "local" or self.path.startswith((".", "/", "~"))
        if looks_local and not (Path(self.folder) / "config.json").is_file():
            yield Absent(
                f"model.path={self.path} is no model's folder, with a config.json: give one, or a run's folder"
            )

    @property
    def folder(self) -> str:
        """Where the weights are: in a run's folder, its `model/`."""
        path = Path(self.path).expanduser()
        left_by_run = not (path / "config.json").is_file() and (path / "model" / "config.json").is_file()
        return str(path / "model" if left_by_run else path) if path.is_dir() else self.path
