"""Whether the problems of a run suffice and fit with their responses; what to do when memory runs out."""

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

PATIENCE_S = 1.5  # of processor time that all runs of a sweep together may take here; the rest is read later
CHARACTERS = 3  # of a token at least, in prose


class Part(NamedTuple):
    """Problems that are asked in one way."""

    name: str  # train or validation
    prompt: PromptConfig
    problems: list[Problem]
    max_tokens: int  # of a response


def parts(run: RunConfig, train: list[Problem], validation: list[Problem]) -> list[Part]:
    """What must fit. SFT samples no responses to its training problems; its traces are measured when they are made."""
    evaluation, asking = run.evaluation, run.asking
    trained = Part("train", asking.prompt, train, asking.sampling.max_tokens)
    asked = Part("validation", evaluation.prompt, validation, evaluation.sampling.max_tokens)
    return [asked] if run.trains and not run.samples_to_learn else [trained, asked]


def room_of(run: RunConfig, context: int) -> tuple[int, str]:
    """(tokens that a prompt and its response may have together, what bounds them)."""
    return min((run.micro_batch_tokens, "micro_batch_tokens"), (context, "the model's context"))


def too_long(run: RunConfig, name: str, sizes: Sequence[int], max_tokens: int, context: int) -> str:
    """Why prompts of these sizes in tokens cannot be asked; empty where they fit or the long ones are left out."""
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


class Foreseen:
    """The problems of the runs of a sweep, read once where they ask the same."""

    def __init__(self) -> None:
        self._deadline = time.process_time() + PATIENCE_S
        self._loaded: dict[str, Loaded | None] = {}

    def problems(self, run: RunConfig) -> Loaded | None:
        """The problems of a run as it will have them but for the grader's checks; None: not quickly had."""
        asked = (run.asked_at_most, run.problems_on_the_way, run.problems_at_the_end)
        drawn = None if run.data.limit is None else run.seed
        key = repr((type(run), getattr(run, "split", None), run.data, run.eval, run.prompt, asked, drawn))
        if key not in self._loaded and time.process_time() < self._deadline:
            quick = run.data.filter == "none" and all(data.quickly_read for data in run.data_read().values())
            self._loaded[key] = load_data(run, say=_quietly) if quick else None
        return self._loaded.get(key)


def _quietly(line: str) -> None:
    """What is left out is said when it is read for the run itself."""


def assumed_prompt(run: RunConfig) -> int | None:
    """Tokens that a prompt is taken to have before it is measured: a question's, and those of its template.

    None for a model made on the spot, whose prompts are short.
    """
    if run.model.made_on_the_spot:
        return None
    asked = (run.evaluation.prompt, run.asking.prompt)
    return PROMPT + max(-(-len(template_of(prompt)) // CHARACTERS) for prompt in asked)


#: How others say it: torch, and vLLM where its cache has no room, or another program holds the GPU.
SIGNS = ("out of memory", "No available memory for the cache blocks", "less than desired GPU memory utilization")
NOTE = "in: "  # how records/console.py notes on an error what was being waited for


def out_of_memory(run: RunConfig, error: BaseException) -> ResourceError | None:
    """The error to end with, in one line; None where this one is no lack of GPU memory."""
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
    """Whether it says that a GPU's memory is used up. A processor's MemoryError has a line of its own."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch's, without importing it
    return named or (isinstance(error, EngineError | RuntimeError) and any(sign in str(error) for sign in SIGNS))
