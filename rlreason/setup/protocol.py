"""The protocol of a run's evaluations, from their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.evaluation import EvalProtocolConfig
from rlreason.data.files import fingerprint
from rlreason.evaluation.protocol import Protocol, make_protocol
from rlreason.setup.graders import grading_settings, reward_name
from rlreason.setup.prompts import asked_how
from rlreason.types import Problem

#: Settings of `sampling` and `grading` that are no part of a protocol, with the reason. Every other field of these two
#: is one, so that a new number makes accuracies that were measured under different values of it incomparable.
LEFT_OUT = {
    "grading.workers": "how many processes share the work changes its speed, not a verdict",
    "grading.start_timeout_s": "ends a run whose processes do not start; it decides no verdict",
    "grading.memory_mb": "bounds those processes; an answer that needs more is undecided, which a grade says of itself",
}


def protocol_of(
    evaluation: EvalProtocolConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> Protocol:
    """How responses to each of these problems are asked for and judged; `tokenizer` has the chat template.

    Prompts that come with the data are part of its hash. The engine stays out, which may only round otherwise, and so
    does a second reward, which decides nothing.
    """
    templated = any(p.prompt is None for p in problems)
    reward = reward_name(evaluation.reward, evaluation.data)
    grading = grading_settings(evaluation.grading, reward)
    if grading.get("correct_at", 1.0) is None:  # which means the same as 1
        grading["correct_at"] = 1.0
    return make_protocol(
        **(asked_how(evaluation.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}),
        reward=reward,
        grading=measured_by("grading", grading),
        sampling=measured_by("sampling", asdict(evaluation.sampling)),
        stop=evaluation.prompt.stop,
        data=fingerprint(problems, asked_only=True),
        problems=len(problems),
        samples=evaluation.samples,
    )


def measured_by(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that are part of a protocol."""
    return {key: value for key, value in settings.items() if f"{group}.{key}" not in LEFT_OUT}
