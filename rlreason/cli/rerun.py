"""Start a run again by its config, print what differs here, and compare the two when the second has ended.

Words behind RUN replace its settings, as in `rlreason rerun RUN seed=1`. It runs in a new folder, RUN_rerun unless
hydra.run.dir=FOLDER names another. On one machine's processor two runs of the same settings are equal bit for bit, but
for times; a difference is said and is no failure: the exit code is that of the run.
"""

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.cli.check import check_start, prepared
from rlreason.cli.command import start_run
from rlreason.cli.compose import RESUME, RUN_DIR, algorithm_of, key_of, repeated
from rlreason.cli.flags import composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.subcommands import STDOUT
from rlreason.config.store import register
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.files import PACKED, opened
from rlreason.records.provenance import MACHINE, code_differs, differences, environment
from rlreason.records.reader import RunFolder
from rlreason.runtime.streams import Answer, Parser

#: Metrics that depend on time. Nothing else may differ between two runs of the same settings on the same machine.
CLOCK = re.compile(r"time/|busy/|perf/|memory/|grading/ms_|eval/tokens_per_second")


class Compared(NamedTuple):
    """The comparison of one kind of record: whether both runs agree (None if one has none), and a sentence."""

    kind: str
    equal: bool | None
    said: str


def compared(one: RunFolder, other: RunFolder) -> list[Compared]:
    """Compare metrics, responses and weights of two runs, a sentence each."""
    return [_metrics(one.metrics, other.metrics), _responses(one.path, other.path), _weights(one.model, other.model)]


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without those that depend on time.

    >>> without_clock({"train/loss": 0.5, "time/total": 3.0, "grading/ms_p99": 1.0})
    {'train/loss': 0.5}
    """
    return {name: value for name, value in row.items() if not CLOCK.match(name)}


def _metrics(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Compared:
    a, b = [without_clock(row) for row in one], [without_clock(row) for row in other]
    if not a or not b:
        return Compared("metrics", None, "metrics: one of the two has no rows")
    for number, (then, now) in enumerate(zip(a, b, strict=False), 1):
        for name in dict.fromkeys((*then, *now)):
            if (name in then) != (name in now) or then[name] != now[name]:
                values = f"{then.get(name)} then, {now.get(name)} now"
                return Compared("metrics", False, f"metrics differ from row {number} on: {name} was {values}")
    if len(a) != len(b):
        return Compared("metrics", False, f"metrics: {len(a)} rows then, {len(b)} now; those of both are equal")
    return Compared("metrics", True, f"metrics are equal ({len(a)} rows)")


def _responses(one: Path, other: Path) -> Compared:
    a, b = _response_files(one), _response_files(other)
    if not a or not b:
        return Compared("responses", None, "responses: one of the two has none")
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return Compared("responses", False, f"responses differ: only one has {name}")
        with opened(a[name]) as then, opened(b[name]) as now:
            for number, (line, twin) in enumerate(zip_longest(then, now), 1):
                if line != twin:
                    return Compared("responses", False, f"responses differ from line {number} of {name} on")
    return Compared("responses", True, f"responses are equal (files: {len(a)})")


def _response_files(folder: Path) -> dict[str, Path]:
    """Return the files of responses by their names in the run folder, without the ending of compressed ones."""
    found = [file.path for kind in (files.ROLLOUTS, files.EVALS) for file in files.response_files(folder, kind)]
    found += [folder / files.RESPONSES] if (folder / files.RESPONSES).is_file() else []
    return {str(path.relative_to(folder)).removesuffix(PACKED): path for path in found}


def _weights(one: Path | None, other: Path | None) -> Compared:
    if one is None or other is None:
        return Compared("weights", None, "weights: not compared, since one of the two has saved none (save_model=true)")
    then, now = _digest(one), _digest(other)
    said = f"weights are equal ({then})" if then == now else f"weights differ: {then} then, {now} now"
    return Compared("weights", then == now, said)


def _digest(model: Path) -> str:
    """Return 8 hex digits of a hash of a model folder's safetensors files and their names."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:8]


EARLY = (*MACHINE, "packages", "hardware", "environment")
LATE = ("data", "prompts", "tokenizer", "model", "sampling", "eval_sampling", "engine", "device")


def add_arguments(parser: Parser) -> None:
    """Add RUN, and words that replace some of its own."""
    parser.add_run("the run to start again")
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings that replace those of RUN")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Run, then compare; the answer has the exit code of the run."""
    then, words = arguments.run, list(arguments.words)
    if wrong := next((word for word in words if key_of(word) == RESUME or "=" not in word.lstrip("~")), None):
        raise ConfigError(f"{wrong} is no setting of a run: write key=value behind RUN, or start it without rerun")
    now = _folder(then, words)
    register()
    with mistakes_in(words):
        request = read([word for word in words if key_of(word) != RUN_DIR])
        with composing(request), in_one_line(request.overrides, composing=True):
            request = prepared(request, console.say, algorithm_of(then))
            one = repeated(then, request.overrides, console.say, now, name="RUN")
            check_start([one.run], now, console.say)
    told, here = RunFolder(then).provenance, environment()
    code_line = code_differs(told, here)
    before = ([code_line] if code_line else []) + differences(told, here, EARLY)
    for line in before or [f"nothing differs from what {then} says of code, libraries and machine"]:
        console.say(f"{'then and now: ' * bool(before)}{line}")
    with _printing_aside(arguments.json == STDOUT):
        code = start_run(one, ["rerun", str(then), *words])
    after = differences(told, RunFolder(now).provenance, LATE)
    results = compared(RunFolder(then), RunFolder(now))
    lines = ["", f"{then} and {now}:", *(f"  then and now: {line}" for line in after)]
    lines += [f"  {result.said}" for result in results]
    return Answer(
        "\n".join(lines),
        {
            "run": str(then),
            "rerun": str(now),
            "status": RunFolder(now).status,
            "environment": [*before, *after],
            "equal": {result.kind: result.equal for result in results},
            "said": [result.said for result in results],
        },
        code,
    )


def _folder(then: Path, words: Sequence[str]) -> Path:
    """Return the folder to run in: the requested one, or the first free one next to RUN."""
    for word in words:
        if key_of(word) == RUN_DIR:
            place = Path(word.partition("=")[2].strip("'\""))
            if place.exists() and (not place.is_dir() or any(place.iterdir())):  # a run there would go on
                raise ConfigError(f"{word}: rerun starts in a new folder: leave it out, or name one that is not there")
            return place
    place = then if then.name else then.absolute()
    free, number = place.with_name(f"{place.name}_rerun"), 1
    while free.exists():
        number += 1
        free = place.with_name(f"{place.name}_rerun_{number}")
    return free


@contextmanager
def _printing_aside(aside: bool) -> Iterator[None]:
    """Send what a run prints in this block to standard error, if standard output is for the figures."""
    if not aside:
        yield
        return
    sys.stdout.flush()
    # A copy of the stream: during a run, standard error itself is its log.
    with open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as screen, redirect_stdout(screen):
        yield
