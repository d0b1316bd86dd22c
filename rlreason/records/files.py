"""The files of a run folder: their names, and how JSON lines are read, appended and cut."""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.runtime import hang as stacks
from rlreason.runtime.files import explained, whole
from rlreason.runtime.signals import held, removed_if_left
from rlreason.runtime.streams import NAME as LOG
from rlreason.runtime.text import few

HYDRA = ".hydra"  # what Hydra writes before the run begins
CONFIG = "config.yaml"  # every setting with its value
STATUS = "status.json"  # how the run stands or ended
PROVENANCE = "provenance.json"  # commit, command, versions; the version of the folder and the schemas of its settings
OBJECTIVE = "objective.md"
FUNCTIONS = "own_functions.txt"  # sources of the user's own rewards, data and losses
METRICS = "metrics.jsonl"  # grows by a row at a time
SUMMARY = "summary.json"  # written last
CURVES = "curves.png"
PROFILE_TRACE, PROFILE_TABLE = "profile.json.gz", "profile.md"  # of one step, where profile=true
INCIDENTS = "grading_incidents.jsonl"
GROWING = (METRICS, INCIDENTS)  # by a line at a time; a checkpoint knows how long they were
ENGINE_LOG = "vllm.log"
ENGINE_LOGS = (ENGINE_LOG, *(f"vllm_{k}.log" for k in range(2, 17)))  # of as many engines as sample side by side
RANKS_LOG = "ranks.log"  # what the ranks besides the first print, where several train
STACKS = stacks.NAME  # what every process did where one was waited for too long
MODEL = "model"
CHECKPOINTS = "checkpoints"  # a folder for each; see records/checkpoints.py
STATE, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"  # in a checkpoint, with MODEL
MOMENTS, SPREAD = "moments.safetensors", "moments"  # those of the optimizer: a file, or a folder where ranks have parts
WANDB, TENSORBOARD = "wandb", "tensorboard"  # folders of loggers
LOGGERS = "loggers.json"  # logger -> the name that its service knows the run by
ROLLOUTS, EVALS = "rollouts", "evals"  # folders with a file of responses for each step
RESPONSES = "responses.jsonl"  # of a job that does not train, in the order of the problems
UNFINISHED = "responses.unfinished.jsonl"  # those of an interrupted job, in the order in which they ended
PASS_RATES = "pass_rates.jsonl"
BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE = "best_of_n.csv", "best_of_n.png"
CALLS = "calls.jsonl"  # of a run of discovery: every request and what came of it, as it happens
CONVERSATION, PROGRAM = "conversation_log.json", "program.py"  # the conversation as a whole, the best program so far
REPORT, SCORE_PICTURE = "report.md", "score.png"
CASES = "inspect.md"
COMPLIANCE = "compliance.md"  # of a run that is held to the rules of a leaderboard; its last line is the verdict
#: `STACKS` is open before a run takes its folder, so it is none of them.
CONTENTS = (
    CONFIG, STATUS, PROVENANCE, OBJECTIVE, FUNCTIONS, METRICS, CURVES, PROFILE_TRACE, PROFILE_TABLE, INCIDENTS,
    ROLLOUTS, EVALS, MODEL, f"{MODEL}.partial", CHECKPOINTS, WANDB, TENSORBOARD, LOGGERS, *ENGINE_LOGS, RANKS_LOG, LOG,
    RESPONSES,
    UNFINISHED, PASS_RATES, BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, CASES, COMPLIANCE, CALLS, CONVERSATION, PROGRAM,
)  # fmt: skip
SET_ASIDE = "broken_off_"  # and a number: a folder in the run folder, for what an earlier run left there

VERSION = 1  # of a folder's contents, in `provenance.json` as "schema_version"; a later one is refused

_STEP_FILE = re.compile(r"step_(\d+)(?:_update_(\d+))?\.jsonl(?:\.gz)?")  # one that a person has unpacked, too


class ResponseFile(NamedTuple):
    """A file of graded responses. `step` is None in a job without steps.

    `update`: the optimizer update behind which it was evaluated, where that was not the last one of a step.
    """

    path: Path
    kind: str  # ROLLOUTS, EVALS or RESPONSES
    step: int | None = None
    update: int | None = None


def step_name(step: int, update: int | None = None) -> str:
    """The name of a step's file of responses.

    >>> step_name(3), step_name(4, update=9)
    ('step_00003.jsonl.gz', 'step_00004_update_00009.jsonl.gz')
    """
    return f"step_{step:05d}{'' if update is None else f'_update_{update:05d}'}.jsonl.gz"


def response_files(folder: Path, kind: str) -> list[ResponseFile]:
    """The files of `rollouts/` or `evals/` in a run folder, in the order of their steps; [] where there are none."""
    found = [
        ResponseFile(path, kind, int(named[1]), int(named[2]) if named[2] else None)
        for path in (folder / kind).glob("step_*.jsonl*")
        if (named := _STEP_FILE.fullmatch(path.name)) and path.is_file()
    ]
    return sorted(found, key=lambda file: (file.step, file.update or -1))


NAMED = 3  # broken lines of a file that are reported one by one
Checks = Callable[[dict[str, Any]], str]  # what is wrong with a row, empty where nothing is
PACKED = ".gz"  # ends the name of a file that is compressed
LEVEL = 1  # of zlib: token ids and log-probabilities hardly get smaller with more
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)  # what a compressed file that is cut or altered raises


def opened(path: Path) -> BufferedIOBase:
    """A file of lines to read, unpacked where it is compressed."""
    return gzip.open(path, "rb") if path.suffix == PACKED else path.open("rb")


@contextmanager
def written(path: Path) -> Iterator[BufferedIOBase]:
    """A file of lines to write, compressed where its name says so; it replaces the old one when the block ends.

    The same lines give the same bytes. `UnwritableError` where the system refuses.
    """
    with whole(path) as partial, partial.open("wb") as file:
        if path.suffix != PACKED:
            yield file
            return
        with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as packed:
            yield packed


@contextmanager
def growing(path: Path) -> Iterator[Callable[[Iterable[Mapping[str, Any]]], None]]:
    """Yields a function that adds rows to what becomes the file when the block ends; where it fails, nothing is left.

    Unlike in `written`, a signal ends the block between two additions. `UnwritableError` where the system refuses.
    """
    partial = path.with_name(path.name + ".partial")

    def add(rows: Iterable[Mapping[str, Any]]) -> None:
        with held(), explained(path), partial.open("ab") as file:
            file.writelines(map(line_of, rows))

    with removed_if_left(partial):
        try:
            partial.unlink(missing_ok=True)  # of a process that was killed
            yield add
            with held(), explained(path):
                os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite: JSON has no word for them.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON, with null for every number that is not finite.

    >>> line_of({"a": [1.5, float("inf")]})
    b'{"a": [1.5, null]}\\n'
    """
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # rare, and looking at every number of every row first would cost more than writing it
        text = json.dumps(finite(row), allow_nan=False)
    return text.encode() + b"\n"


def read_lines(path: Path, wrong: Checks, say: Callable[[str], None]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that can be used; the others are named to `say` in one line, and left out.

    Raises `ConfigError` where the file cannot be opened.
    """
    return list(each_line(path, wrong, say))


def each_line(
    path: Path, wrong: Checks, say: Callable[[str], None], shortened: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same one by one, for a file that is larger than what is kept of it.

    `shortened`: takes from a line what is not needed, before it is parsed.
    """
    broken, number = list[str](), 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parsed(shortened(line))
                    if said := wrong(row):
                        raise ValueError(said)
                except (ValueError, RecursionError) as error:
                    broken.append(f"{number} ({error})")
                else:
                    yield number, row
    except DAMAGED as error:
        broken.append(f"{number + 1} and what follows ({type(error).__name__})")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable, or choose another") from error
    if broken:
        say(f"{path}: left out line {few(broken, NAMED)}")


def parsed(line: bytes) -> dict[str, Any]:
    r"""The JSON object in a line.

    >>> parsed(b'{"a": 1}\n')
    {'a': 1}
    >>> parsed(b'{"a": 1, "b')
    Traceback (most recent call last):
    ValueError: half a line
    """
    if b"\0" in line:
        raise ValueError("NUL bytes")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError:
        raise ValueError("not JSON" if line.endswith(b"\n") else "half a line") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row
