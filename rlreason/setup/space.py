"""What a run will write to disk, estimated from its settings before anything is loaded. It must not know torch."""

from pathlib import Path
from typing import NamedTuple

from rlreason.config.evaluation import evaluation_of
from rlreason.config.grpo import GRPOConfig
from rlreason.config.jobs import EvalJobConfig
from rlreason.config.model import PretrainedModelConfig, TinyModelConfig
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.sft import EIConfig
from rlreason.model.tiny_formats import VOCABULARY as TINY_VOCABULARY

RECORDS = 2**20  # bytes for config, metrics and curves, which every run leaves
PER_TOKEN = 30  # bytes of a response's token in a record: its id, two log-probabilities, its text
PER_RESPONSE = 2000  # bytes beside them: question, prompt, grade
EVALUATIONS = 12  # when eval_every=null leaves their number to the run, about


class Space(NamedTuple):
    """Bytes: `model` is what saving the model surely takes, `responses` what records of them may grow to."""

    model: int
    responses: int


def space_needed(run: RunConfig) -> Space:
    """What a run writes beside small files. A model on the hub is of unknown size and counts as nothing."""
    saves = isinstance(run, TrainingConfig) and run.save_model
    count = _responses(run)
    longest = max(run.sampling.max_tokens, evaluation_of(run).sampling.max_tokens)
    half = longest // 2  # most responses end before the limit
    return Space(model_bytes(run) if saves else 0, count * (PER_RESPONSE + PER_TOKEN * half))


def model_bytes(run: RunConfig) -> int:
    """Bytes of the saved weights: of a tiny model counted, of one in a folder measured."""
    per_weight = 2 if run.model.weights == "bfloat16" else 4
    if isinstance(run.model, TinyModelConfig):
        return per_weight * tiny_weights(run.model.width, run.model.layers)
    folder = Path(run.model.folder) if isinstance(run.model, PretrainedModelConfig) else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tiny_weights(width: int, layers: int) -> int:
    """Numbers in a tiny model with a full vocabulary: four matrices of attention and three three times as wide.

    >>> tiny_weights(128, 2)
    688768
    """
    return TINY_VOCABULARY * width + layers * (13 * width * width + 2 * width) + width


def _responses(run: RunConfig) -> int:
    """How many responses are written down, about."""
    evaluation = evaluation_of(run)
    asked = evaluation.samples * (evaluation.final_problems or run.problems_there or 1000)
    if isinstance(run, EvalJobConfig):
        return asked
    assert isinstance(run, TrainingConfig)
    steps: int = getattr(run, "n_steps", None) or 0
    per_step = 0
    if isinstance(run, GRPOConfig):
        per_step = run.rollout_batch_size
    elif isinstance(run, EIConfig):
        per_step = run.question_batch_size * run.group_size
    sampled = steps * per_step // run.save_rollouts_every if run.save_rollouts_every else 0
    evaluations = 2 if run.eval_every == 0 else steps // run.eval_every + 2 if run.eval_every else EVALUATIONS
    on_the_way = evaluation.samples * evaluation.problems if evaluation.problems else asked
    return sampled + evaluations * on_the_way + asked


def in_words(size: float) -> str:
    """A size in bytes as a person reads it.

    >>> in_words(300_000), in_words(2_755_072), in_words(6.2e9)
    ('0.3 MB', '2.8 MB', '6.2 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
