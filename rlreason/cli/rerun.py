"""Start a run again by its config, print what differs here, and compare the two when the second has ended.

Words behind RUN replace its settings, as in `rlreason rerun RUN seed=1`. It runs in a new folder, RUN_rerun unless
hydra.run.dir=FOLDER names another. On one machine's processor two runs of the same settings are equal bit for bit, but
for times; a difference is said and is no failure: the exit code is that of the run.
"""

import argparse
import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from rlreason.cli.check import check_command_line
from rlreason.cli.command import start_run
from rlreason.cli.compose import RESUME, RUN_DIR
from rlreason.cli.subcommands import STDOUT
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.provenance import MACHINE, differences, environment
from rlreason.records.reader import RunFolder, compared
from rlreason.runtime.files import free_folder
from rlreason.runtime.streams import Answer, Parser
from rlreason.sweeps.design import key_of

EARLY = ("code", *MACHINE, "packages", "hardware", "environment")
LATE = ("data", "prompts", "tokenizer", "model", "sampling", "eval_sampling", "engine", "device")


def add_arguments(parser: Parser) -> None:
    """Add RUN, and words that replace some of its own."""
    parser.add_run("the run to start again")
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings that replace those of RUN")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Run, then compare; the answer has the exit code of the run."""
    then, words = arguments.run, list(arguments.words)
    place = then if then.name else then.absolute()
    now = free_folder(place.with_name(f"{place.name}_rerun"))
    for word in [word for word in words if key_of(word) == RUN_DIR]:
        now = Path(word.partition("=")[2].strip("'\""))
        if now.exists() and (not now.is_dir() or any(now.iterdir())):  # a run there would go on
            raise ConfigError(f"{word}: rerun starts in a new folder: leave it out, or name one that is not there")
    changes = [word for word in words if key_of(word) != RUN_DIR]
    one = check_command_line([f"{RESUME}={then}", *changes], console.say, now).one
    assert one is not None
    told, here = RunFolder(then).provenance, environment()
    before = differences(told, here, EARLY)
    for line in before or [f"nothing differs from what {then} says of code, libraries and machine"]:
        console.say(f"{'then and now: ' * bool(before)}{line}")
    with ExitStack() as stack:
        if arguments.json == STDOUT:  # for the figures alone; a copy: during a run, standard error itself is its log
            sys.stdout.flush()
            screen = stack.enter_context(open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace"))
            stack.enter_context(redirect_stdout(screen))
        code = start_run(one, ["rerun", str(then), *words])
    after = differences(told, RunFolder(now).provenance, LATE)
    equal, said = compared(RunFolder(then), RunFolder(now))
    lines = ["", f"{then} and {now}:", *(f"  then and now: {line}" for line in after), *(f"  {line}" for line in said)]
    figures = {"run": str(then), "rerun": str(now), "status": RunFolder(now).status}
    return Answer("\n".join(lines), figures | {"environment": before + after, "equal": equal, "said": said}, code)
