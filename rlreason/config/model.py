"""The config group `model`: what is trained, and how it fits into memory. It knows no other room, and no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING


@dataclass
class WarmStart:
    """The short SFT that gives a model made on the spot its two habits. `steps=0` leaves it out."""

    steps: int = 700
    batch_size: int = 64
    learning_rate: float = 3e-3
    hasty_share: float = 0.72  # of traces that stop after one step and answer wrong
    slip_share: float = 0.05  # of traces with one slip


@dataclass
class Model:
    name: str = MISSING
    dtype: str = "auto"  # of matrix products: auto | float32 | bfloat16; weights stay float32

    def problems(self) -> list[str]:
        if self.dtype in ("auto", "float32", "bfloat16"):
            return []
        return [f"model.dtype={self.dtype} is none of auto, float32, bfloat16: use auto to let the hardware choose"]


@dataclass
class TinyModel(Model):
    width: int = 128
    layers: int = 2
    heads: int = 4
    warm_start: WarmStart = field(default_factory=WarmStart)

    def problems(self) -> list[str]:
        bad = super().problems()
        if min(self.width, self.layers, self.heads) < 1 or self.width % (2 * self.heads):
            bad.append(
                f"model.width={self.width}, model.layers={self.layers}, model.heads={self.heads}: all above 0, and "
                "width a multiple of 2 x heads: try 128, 2 and 4"
            )
        w = self.warm_start
        if w.steps < 0 or w.batch_size < 1 or not w.learning_rate > 0:
            bad.append("model.warm_start: steps must be 0 or more, batch_size and learning_rate above 0")
        if not (0 <= w.hasty_share <= 1 and 0 <= w.slip_share <= 1):
            bad.append("model.warm_start: hasty_share and slip_share are shares and must lie in [0, 1]")
        return bad


@dataclass
class PretrainedModel(Model):
    path: str = MISSING  # a model folder, or a hub name

    def problems(self) -> list[str]:
        bad = super().problems()
        path = Path(self.path).expanduser()
        looks_local = self.name == "local" or self.path.startswith((".", "/", "~"))
        if looks_local and not (path / "config.json").is_file():
            state = "has no config.json" if path.is_dir() else "is no folder"
            bad.append(f"model.path={self.path} {state}: give a model folder in transformers' format")
        return bad
