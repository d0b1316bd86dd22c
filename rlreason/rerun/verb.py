"""Start a run again by its own words, say what is different here, and compare the two when the second has ended.

Words behind RUN replace those that RUN was started with, as in `rlreason rerun RUN seed=1`. It runs in a new folder,
RUN_rerun unless hydra.run.dir=FOLDER names another. On one machine's processor two runs of the same words are equal bit
for bit, but for times; a difference is said and is no failure: the exit code is that of the run.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from rlreason.cli.as_words import key_of
from rlreason.cli.resume_word import RUN_DIR, WORD, recorded_start
from rlreason.cli.verbs import STDOUT
from rlreason.errors import ConfigError
from rlreason.main import do
from rlreason.records.console import Console
from rlreason.records.provenance import MACHINE, code_differs, differences, environment
from rlreason.records.reader import RunFolder
from rlreason.rerun.same_runs import compared
from rlreason.runtime.environment import SWEEP_VARIABLE
from rlreason.runtime.verb import Answer, Parser

EARLY = (*MACHINE, "packages", "hardware", "environment")
LATE = ("data", "prompts", "tokenizer", "model", "sampling", "eval_sampling", "engine", "device")


def add_arguments(parser: Parser) -> None:
    """Add RUN, and words that replace some of its own."""
    parser.add_run("the run to start again")
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings that replace those of RUN")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Run, then compare; the answer has the exit code of the run."""
    then, words = arguments.run, list(arguments.words)
    if wrong := next((word for word in words if key_of(word) == WORD or "=" not in word.lstrip("~")), None):
        raise ConfigError(f"{wrong} is no setting of a run: write key=value behind RUN, or start it without rerun")
    recorded, now = recorded_start(then, "RUN"), _folder(then, words)
    command = recorded.with_words([word for word in words if key_of(word) != RUN_DIR], now)
    told = RunFolder(then).provenance
    for line in recorded.notes:
        console.say(f"note: {line}")
    here = environment()
    code_line = code_differs(told, here)
    before = ([code_line] if code_line else []) + differences(told, here, EARLY)
    for line in before or [f"nothing differs from what {then} says of code, libraries and machine"]:
        console.say(f"{'then and now: ' * bool(before)}{line}")
    if recorded.sweep:
        os.environ[SWEEP_VARIABLE] = recorded.sweep
    with _printing_aside(arguments.json == STDOUT):
        code = _code_of(command)
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
    """Where it runs: the folder that was asked for, or the first one beside RUN that is free."""
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


def _code_of(command: Sequence[str]) -> int:
    """The exit code of the run: a run that diverged ends by its own."""
    try:
        return do(command)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


@contextmanager
def _printing_aside(aside: bool) -> Iterator[None]:
    """In this block what a run prints goes to standard error, where standard output is for the figures alone."""
    if not aside:
        yield
        return
    sys.stdout.flush()
    # A copy of the stream: during a run, standard error itself is its log.
    with open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as screen, redirect_stdout(screen):
        yield
