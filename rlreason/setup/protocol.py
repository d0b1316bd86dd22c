"""The protocol of a run's evaluations, from their settings."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlreason.config.evaluation import EvalProtocolConfig
from rlreason.data.files import fingerprint
from rlreason.evaluation.protocol import Protocol, make_protocol
from rlreason.setup.graders import grading_settings, reward_name
from rlreason.setup.prompts import asked_how
from rlreason.types import Problem


def protocol_of(
    evaluation: EvalProtocolConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> Protocol:
    """How responses to each of these problems are asked for and judged; `tokenizer` has the chat template.

    Prompts that come with the data are part of its hash. Workers and memory of the grader stay out: they change its
    speed. So does the engine: it may only round otherwise. And so does the reward that only grades beside.
    """
    templated = any(p.prompt is None for p in problems)
    reward = reward_name(evaluation.reward, evaluation.data)
    return make_protocol(
        **(asked_how(evaluation.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}),
        reward=reward,
        grading={
            key: 1.0 if key == "correct_at" and value is None else value
            for key, value in grading_settings(evaluation.grading, reward).items()
            if key not in ("workers", "memory_mb")
        },
        sampling={
            "temperature": float(evaluation.sampling.temperature),
            "min_tokens": evaluation.sampling.min_tokens,
            "max_tokens": evaluation.sampling.max_tokens,
        },
        stop=evaluation.prompt.stop,
        data=fingerprint(problems, asked_only=True),
        problems=len(problems),
        samples=evaluation.samples,
    )
