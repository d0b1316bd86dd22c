"""The traces of an SFT run as token ids: prompt, response and end token, none too long for the model."""

from collections.abc import Callable, Sequence

from rlreason.algorithms.sft import sft_sample
from rlreason.config.run import RunConfig
from rlreason.data.traces import trace_text
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.setup.fits import room_of
from rlreason.setup.prompts import end_of_turn
from rlreason.types import Problem, Sample


def make_traces(
    run: RunConfig, policy: Policy, problems: Sequence[Problem], prompt_ids: Callable[[Problem], list[int]]
) -> tuple[list[Sample], list[str]]:
    """(samples with advantage 1, notices). What does not fit is refused, or left out and counted (data.bad_rows)."""
    room, key = room_of(run, policy.max_context)
    end, traces, too_long = end_of_turn(run.prompt, policy.tokenizer), [], []
    for problem in problems:
        text = trace_text(problem, run.prompt.trace)
        ids = policy.encode_response(text, end)
        sample = sft_sample(prompt_ids(problem), ids, text, problem.id)
        if len(sample.response.prompt_ids) + len(ids) > room:
            too_long.append((problem.id, len(sample.response.prompt_ids) + len(ids)))
        else:
            traces.append(sample)
    if not too_long:
        return traces, []
    named = ", ".join(f"{name} ({size} tokens)" for name, size in too_long[:3]) + (" ..." if len(too_long) > 3 else "")
    problem_text = f"{len(too_long)} of {len(problems)} traces are longer than {key}={room} with their prompts: {named}"
    if run.data.bad_rows != "skip" or not traces:
        cure = "set data.bad_rows=skip to leave them out" if traces else "shorten them"
        raise ConfigError(f"{problem_text}; raise micro_batch_tokens as far as the model allows, or {cure}")
    return traces, [f"left out: {problem_text}"]
