"""The config groups: loss, length norm, model, data, prompt, rollout, logger, each key with type and unit.

An option file in `conf/GROUP/` is typed by one of these dataclasses, so a wrong key or type is refused before
anything runs. `problems()` names what is wrong inside a group, with the cure. Defaults that differ by option
stand in the option files. It knows no other room, and imports no torch, so that a typo is answered at once.
"""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING


@dataclass
class Loss:
    """-A log p, or -r log p when `no_baseline`: losses without numbers of their own."""

    loss_type: str = MISSING

    def numbers(self) -> dict[str, float | None]:
        """Keyword arguments of the loss function."""
        return {}


@dataclass
class ClipLoss(Loss):
    """Losses that bound the ratio to [1 - low, 1 + high]."""

    cliprange: float | None = None  # both sides at once
    cliprange_low: float | None = None  # None: cliprange
    cliprange_high: float | None = None  # None: cliprange
    dual_clip: float | None = None  # bound of -A ratio for A < 0, above 1 + high

    def numbers(self) -> dict[str, float | None]:
        low = self.cliprange if self.cliprange_low is None else self.cliprange_low
        high = self.cliprange if self.cliprange_high is None else self.cliprange_high
        dual = {} if self.loss_type == "gspo" else {"dual_clip": self.dual_clip}
        return {"cliprange_low": low, "cliprange_high": high, **dual}

    def problems(self) -> list[str]:
        if self.cliprange is None or self.cliprange_low is None or self.cliprange_high is None:
            return []
        return [
            f"loss.cliprange={self.cliprange} beside loss.cliprange_low={self.cliprange_low} and loss.cliprange_high="
            f"{self.cliprange_high} would be ignored: set the two sides, or set both to null"
        ]


@dataclass
class CispoLoss(Loss):
    """The ratio as a capped weight."""

    ratio_cap: float = 5.0

    def numbers(self) -> dict[str, float | None]:
        return {"ratio_cap": self.ratio_cap}


@dataclass
class LengthNorm:
    kind: str = MISSING
    constant: float | None = None  # tokens; None: sampling.max_tokens. Read by kind=constant only


@dataclass
class Baseline:
    kind: str = MISSING


@dataclass
class StdNorm:
    kind: str = MISSING


@dataclass
class Sampling:
    """How responses are sampled, in training and evaluation alike. No top-k or top-p: what is sampled is trained on."""

    temperature: float = MISSING
    min_tokens: int = MISSING  # a response cannot end before this many tokens
    max_tokens: int = MISSING  # and is cut here


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


@dataclass
class Data:
    name: str = MISSING

    def problems(self) -> list[str]:
        return []


@dataclass
class Stories(Data):
    min_events: int = 2
    max_events: int = 4
    max_value: int = 20
    n_train: int = 8192
    n_validation: int = 1024

    def problems(self) -> list[str]:
        bad = []
        if not 1 <= self.min_events <= self.max_events:
            bad.append(
                f"data.min_events={self.min_events} and data.max_events={self.max_events}: 1 <= min <= max must hold"
            )
        if not 2 <= self.max_value <= 99:
            bad.append(f"data.max_value={self.max_value} must lie in 2..99: numbers have at most two digits")
        if min(self.n_train, self.n_validation) < 1:
            bad.append(f"data.n_train={self.n_train} and data.n_validation={self.n_validation} must be above 0")
        return bad


@dataclass
class FileData(Data):
    path: str = MISSING  # a folder with train.jsonl and test.jsonl, or a hub name
    train_limit: int | None = None  # use the first so many after a shuffle by seed

    def problems(self) -> list[str]:
        if self.train_limit is not None and self.train_limit < 1:
            return [f"data.train_limit={self.train_limit} must be at least 1, or null to use every problem"]
        folder = Path(self.path).expanduser()
        cure = "give a folder with train.jsonl and test.jsonl"
        if not folder.is_dir():
            # One slash and no leading dot may be a hub name; anything else was meant as a folder.
            may_be_hub_name = self.path.count("/") == 1 and not self.path.startswith((".", "/", "~"))
            return [] if may_be_hub_name else [f"data.path={self.path} is no folder: {cure}"]
        missing = [name for name in ("train.jsonl", "test.jsonl") if not (folder / name).is_file()]
        return [f"data.path={self.path} holds no {missing[0]}: {cure}"] if missing else []


@dataclass
class Prompt:
    name: str = MISSING
    file: str = MISSING  # in prompts/, or a path
    reward: str = MISSING  # r1_zero | question_only | module:function, your own (response, gold) -> score
    stop: list[str] = field(default_factory=list)


@dataclass
class Grading:
    """How answers are compared; part of what makes two accuracies comparable."""

    extract: str = "strict"  # strict: the answer itself | last_number | sentence: one number in a sentence counts
    timeout_s: float = 2.0  # of wall clock for one comparison
    percent: bool = True  # 38% equals 38 and 0.38
    rel_tol: float = 1e-6  # of a decimal against an exact value
    workers: int = 1  # processes for what the exact rules cannot decide
    memory_mb: int = 1536  # of each worker

    def problems(self) -> list[str]:
        bad = []
        if self.extract not in ("strict", "last_number", "sentence"):
            bad.append(f"grading.extract={self.extract} is none of strict, last_number, sentence: choose one")
        positive = ("timeout_s", "workers", "memory_mb")
        bad += [f"grading.{key}={getattr(self, key)} must be above 0" for key in positive if getattr(self, key) <= 0]
        if not 0 <= self.rel_tol < 1:
            bad.append(f"grading.rel_tol={self.rel_tol} must lie in [0, 1): try 1e-6")
        return bad


@dataclass
class Rollout:
    engine: str = MISSING
    max_rows: int = 256

    def problems(self) -> list[str]:
        if self.engine != "hf":
            return [f"rollout.engine={self.engine} is no engine: choose rollout=hf"]
        return [] if self.max_rows > 0 else [f"rollout.max_rows={self.max_rows} must be above 0: try 256"]


@dataclass
class Logger:
    kind: str = MISSING
    project: str = "rlreason"
    mode: str = "online"  # online | offline

    def problems(self) -> list[str]:
        bad = []
        if self.kind not in ("none", "wandb"):
            bad.append(f"logger.kind={self.kind} is none of none, wandb: choose logger=none or logger=wandb")
        if self.mode not in ("online", "offline"):
            bad.append(f"logger.mode={self.mode} is none of online, offline: choose one")
        return bad
