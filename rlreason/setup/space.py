"""What a run will write to disk, estimated from its settings before anything is loaded."""

from pathlib import Path
from typing import NamedTuple

from rlreason.config.model import TinyModelConfig
from rlreason.config.run import RunConfig
from rlreason.model.tiny_formats import VOCABULARY as TINY_VOCABULARY

RECORDS = 2**20  # bytes for config, metrics and curves, which every run leaves
PER_TOKEN = 30  # bytes of a response's token in a record: its id, two log-probabilities, its text
PER_RESPONSE = 2000  # bytes besides them: question, prompt, grade


class Space(NamedTuple):
    """Bytes: `model` is what saving the model surely takes, the others what these may grow to."""

    model: int
    responses: int
    checkpoints: int


def space_needed(run: RunConfig) -> Space:
    """What a run writes besides small files. A model on the hub is of unknown size and counts as nothing."""
    longest = max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
    half = longest // 2  # most responses end before the limit
    model, responses = model_bytes(run), run.responses_saved() * (PER_RESPONSE + PER_TOKEN * half)
    return Space(model if run.saves_model else 0, responses, checkpoint_bytes(run, model))


def checkpoint_bytes(run: RunConfig, model: int) -> int:
    """Bytes of the checkpoints that are kept, of the best one and of one being written: weights and both moments."""
    moments = 0 if run.model.lora.rank else model // 2 if run.optimizes_by == "adamw_8bit" else 2 * model
    return run.checkpoints_at_once * (model + moments)


def model_bytes(run: RunConfig) -> int:
    """Bytes of the saved weights: of a tiny model counted, of one in a folder measured."""
    per_weight = 2 if run.model.weights == "bfloat16" else 4
    if isinstance(run.model, TinyModelConfig):
        return per_weight * tiny_weights(run.model.width, run.model.layers)
    files = Path(run.model.folder).glob("*.safetensors") if run.model.folder else ()
    return sum(file.stat().st_size for file in files)


def tiny_weights(width: int, layers: int) -> int:
    """Numbers in a tiny model with a full vocabulary: four matrices of attention and three three times as wide.

    >>> tiny_weights(128, 2)
    688768
    """
    return TINY_VOCABULARY * width + layers * (13 * width * width + 2 * width) + width


def in_words(size: float) -> str:
    """A size in bytes as a person reads it.

    >>> in_words(300_000), in_words(2_755_072), in_words(6.2e9)
    ('0.3 MB', '2.8 MB', '6.2 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
