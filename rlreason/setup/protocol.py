"""The protocol of a run's evaluations, from its settings."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlreason.config.run import Run
from rlreason.data.files import fingerprint
from rlreason.protocol import Protocol, make_protocol
from rlreason.setup.house import grading_settings, reward_name
from rlreason.setup.prompts import asked_how
from rlreason.types import Problem


def protocol_of(
    run: Run, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, samples: int = 1
) -> Protocol:
    """How `samples` responses to each of these problems are asked for and judged; `tokenizer` has the chat template.

    Prompts that come with the data are part of its hash. Workers and memory of the grader stay out: they change its
    speed. So does the engine: it may only round otherwise.
    """
    templated = any(p.prompt is None for p in problems)
    return make_protocol(
        **(asked_how(run.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}),
        reward=reward_name(run),
        grading={
            key: 1.0 if key == "correct_at" and value is None else value
            for key, value in grading_settings(run).items()
            if key not in ("workers", "memory_mb")
        },
        sampling={
            "temperature": float(run.sampling.temperature),
            "min_tokens": run.sampling.min_tokens,
            "max_tokens": run.sampling.max_tokens,
        },
        stop=run.prompt.stop,
        data=fingerprint(problems, asked_only=True),
        problems=len(problems),
        samples=samples,
    )
