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
from rlreason.runtime import hang, streams
from rlreason.runtime.files import explained, whole
from rlreason.runtime.signals import held, removed_if_left
from rlreason.runtime.text import few

HYDRA = ".hydra"  # written by Hydra before the run begins
CONFIG = "config.yaml"  # every setting with its value
STATUS = "status.json"  # the run's current state or its end
PROVENANCE = "provenance.json"  # commit, command, versions; the version of the folder and the schemas of its settings
OBJECTIVE = "objective.md"
FUNCTIONS = "own_functions.txt"  # sources of the user's own rewards, data and losses
METRICS = "metrics.jsonl"  # grows by a row at a time
SUMMARY = "summary.json"  # written last
CURVES = "curves.png"
PROFILE_TRACE, PROFILE_TABLE = "profile.json.gz", "profile.md"  # of one step, where profile=true
INCIDENTS = "grading_incidents.jsonl"
GROWING = (METRICS, INCIDENTS)  # by a line at a time; a checkpoint has their lengths
ENGINE_LOG = "vllm.log"
ENGINE_LOGS = (ENGINE_LOG, *(f"vllm_{k}.log" for k in range(2, 17)))  # one for each engine
RANKS_LOG = "ranks.log"  # output of the ranks besides the first, where several train
STACKS = hang.NAME  # stacks of every process, where a wait took too long
LOG = streams.NAME
MODEL = "model"
CHECKPOINTS = "checkpoints"  # a folder for each; see records/checkpoints.py
STATE, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"  # in a checkpoint, with MODEL
MOMENTS, SPREAD = "moments.safetensors", "moments"  # of the optimizer: a file, or a folder where ranks have parts
WANDB, TENSORBOARD = "wandb", "tensorboard"  # folders of loggers
LOGGERS = "loggers.json"  # logger -> the run's id in its service
ROLLOUTS, EVALS = "rollouts", "evals"  # folders with a file of responses for each step
RESPONSES = "responses.jsonl"  # of a job that does not train, in the order of the problems
UNFINISHED = "responses.unfinished.jsonl"  # responses of an interrupted job, in the order in which they ended
PASS_RATES = "pass_rates.jsonl"
BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE = "best_of_n.csv", "best_of_n.png"
CALLS = "calls.jsonl"  # of a run of discovery: every request and its result, as it happens
CONVERSATION, PROGRAM = "conversation_log.json", "program.py"  # the conversation as a whole, the best program so far
REPORT, SCORE_PICTURE = "report.md", "score.png"
CASES = "inspect.md"
COMPLIANCE = "compliance.md"  # the check of a leaderboard's rules; its last line is the verdict
#: Without `STACKS`, which is open before a run takes its folder.
CONTENTS = (
    CONFIG, STATUS, PROVENANCE, OBJECTIVE, FUNCTIONS, METRICS, CURVES, PROFILE_TRACE, PROFILE_TABLE, INCIDENTS,
    ROLLOUTS, EVALS, MODEL, f"{MODEL}.partial", CHECKPOINTS, WANDB, TENSORBOARD, LOGGERS, *ENGINE_LOGS, RANKS_LOG, LOG,
    RESPONSES,
    UNFINISHED, PASS_RATES, BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, CASES, COMPLIANCE, CALLS, CONVERSATION, PROGRAM,
)  # fmt: skip
SET_ASIDE = "broken_off_"  # and a number: a folder in the run folder for the files of an earlier run

VERSION = 1  # of a folder's contents, in `provenance.json` as "schema_version"; later ones are refused

_STEP_FILE = re.compile(r"step_(\d+)(?:_update_(\d+))?\.jsonl(?:\.gz)?")  # also one that a person has unpacked


class ResponseFile(NamedTuple):
    """A file of graded responses. `step` is None in a job without steps.

    `update`: the optimizer update after which it was evaluated, where that was not the last one of a step.
    """

    path: Path
    kind: str  # ROLLOUTS, EVALS or RESPONSES
    step: int | None = None
    update: int | None = None


def step_name(step: int, update: int | None = None) -> str:
    """Return the name of a step's file of responses.

    >>> step_name(3), step_name(4, update=9)
    ('step_00003.jsonl.gz', 'step_00004_update_00009.jsonl.gz')
    """
    return f"step_{step:05d}{'' if update is None else f'_update_{update:05d}'}.jsonl.gz"


def response_files(folder: Path, kind: str) -> list[ResponseFile]:
    """Return the files of `rollouts/` or `evals/` in a run folder, in the order of their steps."""
    found = [
        ResponseFile(path, kind, int(named[1]), int(named[2]) if named[2] else None)
        for path in (folder / kind).glob("step_*.jsonl*")
        if (named := _STEP_FILE.fullmatch(path.name)) and path.is_file()
    ]
    return sorted(found, key=lambda file: (file.step, file.update or -1))


NAMED = 3  # broken lines of a file that are reported one by one
Checks = Callable[[dict[str, Any]], str]  # returns the fault of a row, or an empty text
PACKED = ".gz"  # suffix of a compressed file
LEVEL = 1  # of zlib: token ids and log-probabilities hardly get smaller with more
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)  # errors of a compressed file that is truncated or altered


def opened(path: Path) -> BufferedIOBase:
    """Open a file of lines for reading, decompressed where it is compressed."""
    return gzip.open(path, "rb") if path.suffix == PACKED else path.open("rb")


@contextmanager
def written(path: Path) -> Iterator[BufferedIOBase]:
    """Yield a file of lines to write, compressed if its suffix says so; it replaces the old one when the block ends.

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
    """Yield a function that adds rows to a file, which appears when the block ends; a failure leaves nothing.

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
    """Replace every number that is not finite by None, since JSON has no such numbers.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, with null for every number that is not finite.

    >>> line_of({"a": [1.5, float("inf")]})
    b'{"a": [1.5, null]}\\n'
    """
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # rare, and checking every number first would cost more than writing the row
        text = json.dumps(finite(row), allow_nan=False)
    return text.encode() + b"\n"


def read_lines(path: Path, wrong: Checks, say: Callable[[str], None]) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, row) of every usable line; report the others to `say` in one line.

    Raises `ConfigError` where the file cannot be opened.
    """
    return list(each_line(path, wrong, say))


def each_line(
    path: Path, wrong: Checks, say: Callable[[str], None], shortened: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the same one by one, for a large file; `shortened` removes unneeded parts of a line before parsing."""
    broken, number = list[str](), 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parsed(shortened(line))
                    if fault := wrong(row):
                        raise ValueError(fault)
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
    r"""Parse the JSON object in a line.

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
