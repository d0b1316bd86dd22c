"""Whether a run's problems fit with their responses; the error for exhausted GPU memory."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlreason.config.evaluation import sampling_key
from rlreason.config.groups import PromptConfig
from rlreason.config.run import RunConfig
from rlreason.data.prepare import Loaded, load_data
from rlreason.data.prompts import template_of
from rlreason.errors import EngineError, ResourceError
from rlreason.model.memory import PROMPT
from rlreason.types import Problem

PATIENCE_S = 1.5  # of processor time for all runs of a sweep together; the rest is read later
CHARACTERS = 3  # at least, in a token of prose


class Part(NamedTuple):
    """Problems that share a prompt and a token limit."""

    name: str  # train or validation
    prompt: PromptConfig
    problems: list[Problem]
    max_tokens: int  # tokens of a response


def parts(run: RunConfig, train: list[Problem], validation: list[Problem]) -> list[Part]:
    """Return the problems that must fit. SFT samples none of its training problems; `make_traces` measures them."""
    evaluation, asking = run.evaluation, run.asking
    trained = Part("train", asking.prompt, train, asking.sampling.max_tokens)
    asked = Part("validation", evaluation.prompt, validation, evaluation.sampling.max_tokens)
    return [asked] if run.trains and not run.samples_to_learn else [trained, asked]


def room_of(run: RunConfig, context: int) -> tuple[int, str]:
    """Return (tokens for a prompt and its response together, the setting that limits them)."""
    return min((run.micro_batch_tokens, "micro_batch_tokens"), (context, "the model's context"))


def too_long(run: RunConfig, name: str, sizes: Sequence[int], max_tokens: int, context: int) -> str:
    """Say why prompts of these sizes in tokens do not fit; "" if they do or the long ones are left out."""
    asked, data = name == "validation", run.data if run.eval.data is None else run.eval.data
    own = sampling_key(run, "max_tokens") if asked or not run.trains else "sampling.max_tokens"
    skip = (data if asked else run.data).bad_rows == "skip"
    room, key = room_of(run, context)
    longest = room - max_tokens
    if not sizes or max(sizes) <= longest or (skip and min(sizes) <= longest):
        return ""
    needed, count = max(sizes) + max_tokens, sum(size > longest for size in sizes)
    return (
        f"{own}={max_tokens} and the longest prompt need {needed} tokens, more than "
        f"{key}={room} ({count} of {len(sizes)} {name} prompts): lower {own}"
        + (f", or set {key}={needed}" if key[0] == "m" else "")
        + (
            ""
            if count == len(sizes)
            else f", or leave them out with {'eval.' * (asked and data is not run.data)}data.bad_rows=skip"
        )
    )


class ProblemCache:
    """Reads the problems of a sweep's runs, once for runs with the same data settings."""

    def __init__(self) -> None:
        self._deadline = time.process_time() + PATIENCE_S
        self._loaded: dict[str, Loaded | None] = {}

    def problems(self, run: RunConfig) -> Loaded | None:
        """Return a run's problems before the grader's checks, or None if they cannot be read quickly."""
        asked = (run.problem_limit, run.problems_on_the_way, run.problems_at_the_end)
        drawn = None if run.data.limit is None else run.seed
        key = repr((type(run), getattr(run, "split", None), run.data, run.eval, run.prompt, asked, drawn))
        if key not in self._loaded and time.process_time() < self._deadline:
            quick = run.data.filter == "none" and all(data.quickly_read for data in run.data_read().values())
            # Messages are printed when the run itself reads the data.
            self._loaded[key] = load_data(run, say=lambda line: None) if quick else None
        return self._loaded.get(key)


def assumed_prompt(run: RunConfig) -> int | None:
    """Estimate the tokens of a prompt not yet measured: of a question and of its template.

    None for a built-in model, whose prompts are short.
    """
    if run.model.made_on_the_spot:
        return None
    asked = (run.evaluation.prompt, run.asking.prompt)
    return PROMPT + max(-(-len(template_of(prompt)) // CHARACTERS) for prompt in asked)


#: Messages of torch, and of vLLM if its cache has no room or another program holds the GPU.
SIGNS = ("out of memory", "No available memory for the cache blocks", "less than desired GPU memory utilization")
NOTE = "in: "  # of the note that records/console.py adds to an error: what it was waiting for


def out_of_memory(run: RunConfig, error: BaseException) -> ResourceError | None:
    """Return the one-line error to end with; None if `error` is not about GPU memory."""
    causes = list(_causes(error))
    if not any(_is_one(cause) for cause in causes):
        return None
    doing = next((note for cause in causes for note in getattr(cause, "__notes__", []) if note.startswith(NOTE)), "")
    what = f" in {doing.removeprefix(NOTE)}" if doing else ""
    return ResourceError(
        f"out of memory{what}: lower micro_batch_tokens={run.micro_batch_tokens} or "
        f"rollout.max_rows={run.rollout.max_rows}, set model.gradient_checkpointing=true, or end other programs on the "
        "GPU (rlreason plan shows what takes how much)"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_one(error: BaseException) -> bool:
    """Whether a GPU's memory is exhausted. A processor's MemoryError has its own message."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch's class, without importing torch
    return named or (isinstance(error, EngineError | RuntimeError) and any(sign in str(error) for sign in SIGNS))
