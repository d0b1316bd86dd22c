"""Where a GPU's memory runs out although the plan let the run begin: one line with what was being done."""

from collections.abc import Iterator

from rlreason.config.run import RunConfig
from rlreason.errors import EngineError, ResourceError

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
