"""The config group `model`: what is trained, and how it fits into memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlreason.errors import Absent
from rlreason.settings import MADE, MAX_SEED, choice, group, number, share, source, text

#: Prompt options that share one warm start of the built-in model, so that an ablation starts from equal weights.
SHARED_WARM_START = ("r1_zero", "question_only", "question_boxed", "r1_zero_three_shot")

LET_HARDWARE = "use auto to let the hardware choose"
TINY_CONTEXT = 512  # positions of the built-in model, for prompt and response together


def type_of_head(head: str, engine: str, products: str) -> str:
    """Return the dtype of the output head's operands, given `model.head`, `rollout.engine` and the dtype of products.

    vLLM keeps its head's weights in the type of its products and sums in float32 (0.32, logits_processor.py:
    `torch.mm(hidden, weight, out_dtype=float32)` on a GPU; on a processor it converts the rounded numbers to float32).
    The in-process engine samples with the trainer's own head.

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
    learning_rate: float = number(
        3e-3, above=0, high=1e30, doc="the highest of the warm start", only_if="here.steps > 0"
    )
    hasty_share: float | None = share(
        None,
        doc="share of traces that answer after the first sum, mostly wrong; null: data.habits.hasty_share",
        only_if="here.steps > 0",
    )
    slip_share: float | None = share(
        None, doc="share of traces whose last sum is wrong; null: data.habits.slip_share", only_if="here.steps > 0"
    )


@dataclass
class LoRAConfig:
    """Low-rank adapters: the model's own weights stay as they are. Needs peft. They have no dropout."""

    rank: int = number(0, high=2**16, doc="of the adapters; 0: none, every weight is trained", only_if="trains")
    alpha: float = number(
        32.0, above=0, doc="the adapters' output is scaled by alpha / rank", only_if="trains and here.rank > 0"
    )
    targets: list[str] | None = text(
        None,
        doc="patterns on layer names, as in [q_proj,v_proj]; null: every linear layer but the head",
        only_if="trains and here.rank > 0",
    )

    def problems(self) -> list[str]:
        """Every violated rule inside the group."""
        if self.targets is not None and not self.targets:
            return ["model.lora.targets=[] adapts nothing: name layers, or null for every linear layer but the head"]
        return []


@dataclass
class ModelConfig:
    """What is trained, and how it fits into memory; first the settings of every model."""

    #: Whether it is the built-in tiny model, which has no files.
    made_on_the_spot: ClassVar[bool] = False

    name: str = text(doc="of the option, for records")
    dtype: str = choice(
        "auto",
        "float32",
        "bfloat16",
        doc="number type of matrix products; auto: bfloat16 on a GPU, else float32",
        cure=LET_HARDWARE,
    )
    head: str = choice(
        "auto",
        "float32",
        "bfloat16",
        doc="number type of the output head's operands, its weights rounded for the product only; sums, logits "
        "and log-sum-exps are always float32. auto: as in the engine's head, bfloat16 with vLLM in bfloat16, "
        "else float32",
        cure="use auto to do as the engine does",
    )
    weights: str = choice(
        "float32",
        "bfloat16",
        doc="number type of the weights; bfloat16: half the memory, but small updates are rounded away",
    )
    attention: str = choice(
        "auto",
        "sdpa",
        "varlen",
        "flash_attention_2",
        doc="kernel of attention over packed sequences; the header of a run says which auto took, and why",
        cure=LET_HARDWARE,
    )
    gradient_checkpointing: bool = text(
        False, doc="less memory, a third more work: activations are computed again", only_if="trains"
    )
    check_memory: bool = text(True, doc="refuse a run that certainly needs more memory than its GPU has")
    freeze: list[str] = text([], doc="patterns on names of weights that are not trained", only_if="trains")
    lora: LoRAConfig = group(LoRAConfig)

    @property
    def folder(self) -> str | None:
        """Where the weights are; None for the built-in model."""
        return None

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = self.lora.problems()
        if self.weights == "bfloat16" and self.dtype == "float32":
            bad.append(
                "model.dtype=float32 with model.weights=bfloat16: products cannot be more exact than their weights: "
                "set model.dtype=auto, or model.weights=float32"
            )
        if self.head == "bfloat16" and self.dtype == "float32":
            bad.append(
                "model.head=bfloat16 with model.dtype=float32: the engine's head multiplies as its other layers do, in "
                "float32: set model.head=auto, or model.dtype=bfloat16"
            )
        if self.freeze and self.lora.rank:
            bad.append(
                f"model.freeze={list(self.freeze)} with model.lora.rank={self.lora.rank}: adapters leave all weights "
                "of the model frozen already: set model.freeze=[], and say where adapters go by model.lora.targets"
            )
        return bad


@dataclass
class TinyModelConfig(ModelConfig):
    """The built-in model, made here and taught habits by a warm start: those of the stories."""

    made_on_the_spot: ClassVar[bool] = True

    width: int = number(128, low=1, high=1024, doc="numbers per token, a multiple of 2 x heads")
    layers: int = number(2, low=1, high=32, doc="transformer blocks")
    heads: int = number(4, low=1, high=64, doc="attention heads per block")
    seed: int = number(
        0, high=MAX_SEED, doc="of its weights and its warm start; not `seed`, so that compared runs start alike"
    )
    cache: str | None = text(
        "auto",
        doc="where it is kept: auto: ~/.cache/rlreason; a folder; null: made anew each time",
        only_if="here.warm_start.steps > 0",
    )
    warm_start: WarmStartConfig = group(WarmStartConfig)

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.heads > 0 and self.width % (2 * self.heads):
            bad.append(
                f"model.width={self.width} must be a multiple of 2 x model.heads={self.heads}: try model.width=128 "
                "model.heads=4"
            )
        if self.cache == "":
            bad.append("model.cache= names no folder: give one, or auto, or null to make the model anew each time")
        return bad


@dataclass
class PretrainedModelConfig(ModelConfig):
    """A model in transformers' format."""

    path: str = source(doc="a model folder, the folder of a run that left one, or a hub name")

    @property
    def folder(self) -> str:
        """Where the weights are: in a run's folder, its `model/`."""
        path = Path(self.path).expanduser()
        left_by_run = not (path / "config.json").is_file() and (path / "model" / "config.json").is_file()
        return str(path / "model" if left_by_run else path) if path.is_dir() else self.path

    def problems(self) -> list[str]:
        bad = super().problems()
        looks_local = self.name == "local" or self.path.startswith((".", "/", "~"))
        if looks_local and not (Path(self.folder) / "config.json").is_file():
            state = "has no config.json" if Path(self.folder).is_dir() else "is no folder"
            cure = "give a model folder in transformers' format, or a run's folder"
            bad.append(Absent(f"model.path={self.path} {state}: {cure}"))
        return bad
