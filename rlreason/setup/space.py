"""What a run will write to disk, estimated from its settings before anything is loaded."""

from pathlib import Path
from typing import NamedTuple

from rlreason.config.run import RunConfig
from rlreason.memory.formula import moment_bytes, trained_tensors, weight_bytes
from rlreason.memory.machine import decimal_size
from rlreason.memory.shapes import ModelShape, shape_of

RECORDS = 2**20  # bytes for config, metrics and curves, which every run leaves
in_words = decimal_size  # how a size on disk is said
PER_TOKEN = 30  # bytes of a response's token in a record: its id, two log-probabilities, its text
PER_RESPONSE = 2000  # bytes besides them: question, prompt, grade


class Space(NamedTuple):
    """Bytes: `model` is what saving the model surely takes, the others what these may grow to.

    `kept`: those of the checkpoints that stay when the run has finished, the newest sharing the model's.
    """

    model: int
    responses: int
    checkpoints: int
    kept: int

    @property
    def peak(self) -> int:
        """What may lie there while the run goes on."""
        return self.model + self.responses + self.checkpoints

    @property
    def left(self) -> int:
        """What a finished run leaves."""
        return self.model + self.responses + self.kept


def space_needed(run: RunConfig) -> Space:
    """What a run writes besides small files. A model of unknown size counts as nothing."""
    longest = max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
    half = longest // 2  # most responses end before the limit
    shape = shape_of(run.model).shape
    model, responses = model_bytes(run, shape), run.responses_saved() * (PER_RESPONSE + PER_TOKEN * half)
    saved, moments, most = model if run.saves_model else 0, moments_of(run, shape, model), run.checkpoints_at_once
    stay = min(2, most) * (model + (moments if run.keeps_moments else 0)) - (saved if most else 0)
    return Space(saved, responses, most * (model + moments), max(stay, 0))


def moments_of(run: RunConfig, shape: ModelShape | None, model: int) -> int:
    """Bytes of both moments in one checkpoint; `model`: those of its weights."""
    optimizer = run.optimizes_by
    if optimizer is None:
        return 0
    own = run.model
    if shape is None:
        return 0 if own.lora.rank else model // 2 if optimizer == "adamw_8bit" else 2 * model
    trained = trained_tensors(shape, _per_weight(run), own.freeze, own.lora.rank, own.lora.targets)
    return moment_bytes(trained, optimizer)


def model_bytes(run: RunConfig, shape: ModelShape | None) -> int:
    """Bytes of the saved weights: by the model's shape, or as the files of a folder where that is unknown."""
    if shape is not None:
        return weight_bytes(shape, _per_weight(run))
    files = Path(run.model.folder).glob("*.safetensors") if run.model.folder else ()
    return sum(file.stat().st_size for file in files)


def _per_weight(run: RunConfig) -> int:
    return 2 if run.model.weights == "bfloat16" else 4
