"""The files of a run folder: their names, and how JSON lines are read, appended and cut."""

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.runtime import streams
from rlreason.runtime.files import explained, whole, write_whole

CONFIG = "config.yaml"  # every setting with its value
STATUS = "status.json"  # the run's current state or its end
PROVENANCE = "provenance.json"  # commit, command, versions; the version of the folder
OBJECTIVE = "objective.md"
FUNCTIONS = "own_functions.txt"  # sources of the user's own rewards, data and losses
METRICS = "metrics.jsonl"  # grows by a row at a time
SUMMARY = "summary.json"  # written last
CURVES = "curves.png"
PROFILE_TRACE, PROFILE_TABLE = "profile.json.gz", "profile.md"  # of one step, where profile=true
INCIDENTS = "grading_incidents.jsonl"
GROWING = (METRICS, INCIDENTS)  # by a line at a time; a checkpoint has their numbers of lines
ENGINE_LOG = "vllm.log"
ENGINE_LOGS = (ENGINE_LOG, *(f"vllm_{k}.log" for k in range(2, 17)))  # one for each engine
RANKS_LOG = "ranks.log"  # output of the ranks besides the first, where several train
STACKS = "stacks.txt"  # of the threads of a run that hung
LOG = streams.NAME
MODEL = "model"
CHECKPOINTS = "checkpoints"  # a folder for each; see records/checkpoints.py
STATE, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"  # in a checkpoint, with MODEL
MOMENTS = "moments.safetensors"  # of the optimizer, in a checkpoint
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
CASES_OF = "inspect"  # the same of one category, CATEGORY.md
COMPLIANCE = "compliance.md"  # the check of a leaderboard's rules; its last line is the verdict
#: Without `STACKS`, which is open before a run takes its folder.
CONTENTS = (
    CONFIG, STATUS, PROVENANCE, OBJECTIVE, FUNCTIONS, METRICS, CURVES, PROFILE_TRACE, PROFILE_TABLE, INCIDENTS,
    ROLLOUTS, EVALS, MODEL, f"{MODEL}.partial", CHECKPOINTS, WANDB, TENSORBOARD, LOGGERS, *ENGINE_LOGS, RANKS_LOG, LOG,
    RESPONSES, UNFINISHED, PASS_RATES,
    BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, CASES, CASES_OF, COMPLIANCE, CALLS, CONVERSATION, PROGRAM,
)  # fmt: skip
SET_ASIDE = "broken_off_"  # and a number: a folder in the run folder for the files of an earlier run

Note = Callable[[str], object]  # takes a line about what is broken, or what was done
VERSION = 1  # of a folder's contents, in `provenance.json` as "schema_version"; later ones are refused

_STEP_FILE = re.compile(r"step_(\d+)(?:_update_(\d+))?\.jsonl(?:\.gz)?")  # also one that a person has unpacked


class ResponseFile(NamedTuple):
    """A file of graded responses. `step` is None in a job without steps.

    `update`: the optimizer update before it, in the second evaluation of a step.
    """

    path: Path
    kind: str  # ROLLOUTS, EVALS, EVALS/NAME or RESPONSES
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
    step_files = [
        ResponseFile(path, kind, int(match[1]), int(match[2]) if match[2] else None)
        for path in (folder / kind).glob("step_*")
        if (match := _STEP_FILE.fullmatch(path.name))
    ]
    return sorted(step_files, key=lambda file: (file.step, file.path.name))


def sets_of(folder: Path) -> list[str]:
    """Return the validation sets (`eval.sets`) whose responses are in a run folder, below `evals/`."""
    return sorted(path.name for path in (folder / EVALS).glob("*/"))


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


def finite(value: Any) -> Any:
    """Return the value as JSON has it, with None for every number that is not finite, and any other object as text.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)


def read_json(path: Path) -> Any:
    """Return the value in a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Replace a file by this value as JSON, with null for every number that is not finite."""
    write_whole(path, json.dumps(finite(value), indent=indent) + "\n")


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, with null for every number that is not finite."""
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # rare, and checking every number first would cost more than writing the row
        text = json.dumps(finite(row), allow_nan=False)
    return text.encode() + b"\n"


def each_line(path: Path, say: Note, needed: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of every line with a JSON object that has the needed fields; `say` that others are not.

    The first line of an unfinished log, its `identity`, has none of them and is left out in silence. `ConfigError`
    where the file cannot be read.
    """
    broken = list[str]()
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):  # half a line of a killed process, say
                    row = None
                if not isinstance(row, dict):
                    broken.append(f"line {number} is no JSON object")
                elif not (missing := [name for name in needed if name not in row]):
                    yield number, row
                elif "identity" not in row:
                    broken.append(f"line {number} has no '{missing[0]}'")
    except (OSError, *DAMAGED) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): move it away, or mend it") from error
    if broken:
        say(f"{path}: left out {len(broken)} of its lines: {broken[0]}")


def name_of(steps: int, updates: int, evaluations: int) -> str:
    """Return the name of a checkpoint after this many steps, updates and evaluations.

    >>> name_of(12, 34, 3)
    'step_00012_update_00034_eval_00003'
    """
    return f"step_{steps:05d}_update_{updates:05d}_eval_{evaluations:05d}"


def write_checkpoint(folder: Path, name: str, state: dict[str, Any], write: Callable[[Path], object]) -> Path:
    """Write the checkpoint `name` of the run in `folder`; `write` writes the large files into the given folder.

    It gets its name when it is complete. On `UnwritableError` nothing of it stays, and earlier ones are unchanged.
    """
    path = folder / CHECKPOINTS / name
    with whole(path) as partial:
        partial.mkdir(parents=True)
        write(partial)
        write_whole(partial / STATE, json.dumps(state))
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        listed = {str(file.relative_to(partial)): (file.stat().st_size, digest(file)) for file in files}
        write_json(partial / MANIFEST, listed, 1)
    return path


def digest(path: Path) -> str:
    """Hash a file's bytes to 32 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    complete = [path for path in (folder / CHECKPOINTS).glob("step_*") if path.suffix == ""]
    return sorted(complete, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def newest_good(folder: Path, say: Note) -> Path:
    """Return the newest checkpoint whose files are intact, and report every newer one; `ConfigError` without any."""
    for path in reversed(checkpoints_in(folder)):
        if not (fault := checkpoint_fault(path)):
            return path
        say(f"! {path} cannot be used: {fault}")
    raise ConfigError(
        f"hydra.run.dir={folder} holds no checkpoint that can be used: choose another folder, or move {CHECKPOINTS}/ "
        "away to begin anew"
    )


def checkpoint_fault(path: Path) -> str:
    """Return why a checkpoint cannot be used, or nothing."""
    try:
        for name, (_, digest_then) in read_json(path / MANIFEST).items():
            if digest(path / name) != digest_then:
                return f"{name} is not as it was written"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def pruned(names: list[str], accuracies: dict[str, float], keep: int) -> list[str]:
    """Return the checkpoints to remove, of these, oldest first: all but the newest `keep` and the newest best one.

    `accuracies`: of the evaluated ones.

    >>> pruned(["a", "b", "c", "d"], {"a": 0.5, "b": 0.7, "c": 0.6}, keep=1)
    ['a', 'c']
    """
    best = max(reversed(names), key=lambda name: accuracies.get(name, -1.0), default=None)
    stay = {*names[-keep:], *([best] if best in accuracies else [])}
    return [name for name in names if name not in stay]


def remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partly removed one is never taken for a whole one."""
    with explained(path):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def moments_in(path: Path) -> int:
    """Return the bytes of the optimizer's moments; 0 in a checkpoint of a finished run."""
    size, _ = read_json(path / MANIFEST).get(MOMENTS, (0, ""))
    return int(size)


def remove_moments(path: Path) -> None:
    """Remove the moments from a checkpoint, from the manifest first, so that the checkpoint stays valid."""
    listed = read_json(path / MANIFEST)
    listed.pop(MOMENTS, None)
    with explained(path):
        write_json(path / MANIFEST, listed, 1)
        (path / MOMENTS).unlink(missing_ok=True)


def linked(source: Path, target: Path) -> None:
    """Copy the folder `source` to `target` with hard links where the file system allows it."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    if target.exists():
        shutil.rmtree(target)
    with whole(target) as partial:
        shutil.copytree(source, partial, copy_function=link)
