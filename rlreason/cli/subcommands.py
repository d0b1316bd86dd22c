"""Dispatch `rlreason SUBCOMMAND ...`. Subcommands read run folders; only `rerun` starts a run.

Dispatch, --help and suggestions read one table, `SUBCOMMANDS`. A subcommand is one line of it and a module, whose
docstring is shown by `rlreason SUBCOMMAND --help` and which defines

    add_arguments(parser)                 its options; `parser.add_run` adds RUN, the folder of a run
    main(arguments, console) -> Answer    its result; `console` shows progress

`--json` is the same for all: it prints only the figures, and `--json FILE` writes them.
"""

import difflib
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rlreason.cli.ls import LAST, RUNS, newest
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CONVERSATION, finite
from rlreason.records.reader import runs_in
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer, Parser, folded, refuse_target

STDOUT = "-"  # as the FILE of --json


#: Name -> module, arguments as --help names them, and purpose in one line.
SUBCOMMANDS = {
    "inspect": ("rlreason.cli.inspect", "RUN",
                "responses, with a guess at what went wrong in each; --regrade, --gradients"),
    "report": ("rlreason.cli.report", "RUN ...", "verdicts, curves and tables of runs and sweeps, as a page"),
    "compare": ("rlreason.report.compare", "RUN ...", "which setting is better, by how much, or that nobody can tell"),
    "score": ("rlreason.discovery.score", "PROGRAM",
              "a program of discovery: run in a sandbox, its set checked exactly"),
    "health": ("rlreason.health.watch", "RUN ...", "what is wrong with a run: evidence, causes, what to try"),
    "doctor": ("rlreason.cli.doctor", "[WORD ...]", "what this machine can do, and whether a run of these words fits"),
    "check": ("rlreason.courses.check.runner", "MODULE",
              "your own functions or train loop of a handout, held against ours"),
    "curves": ("rlreason.records.training_curves", "RUN", "draw curves.png again, also of a run that is under way"),
    "plan": ("rlreason.cli.plan", "[WORD ...]", "the memory of a run of these words; --seeds S: what they can show"),
    "ls": ("rlreason.cli.ls", "[DIR]", "the runs and sweeps below a folder: when, what, how far, how good, how large"),
    "diff": ("rlreason.cli.diff", "RUN RUN", "in what two runs differ: settings, code, data, machine, figures"),
    "clean": ("rlreason.cli.clean", "RUN ...", "checkpoints that only take space: list them, or remove them (--yes)"),
    "pack": ("rlreason.cli.pack", "RUN|SWEEP", "a run or sweep without its weights, as one file to hand in"),
    "rerun": ("rlreason.cli.rerun", "RUN [WORD ...]", "start it again: what differs here, and in what it comes to"),
}  # fmt: skip


def named_subcommand(words: Sequence[str]) -> str:
    """Return the subcommand that a command line begins with, or ""."""
    return words[0] if words and words[0] in SUBCOMMANDS else ""


def refuse_wrong_subcommand(words: Sequence[str]) -> None:
    """Raise `ConfigError` if the first word is nearly a subcommand, which has no equals sign, as an override has.

    >>> refuse_wrong_subcommand(["inspct", "runs/a"])
    Traceback (most recent call last):
    rlreason.errors.ConfigError: inspct is no subcommand: did you mean rlreason inspect? (rlreason --help lists them)
    """
    if words and words[0].lower() in ("train", "run", "start"):
        raise ConfigError(f"{words[0]} is no subcommand: a run starts without one, leave it out (rlreason --help)")
    if words and (near := difflib.get_close_matches(words[0].lower(), SUBCOMMANDS, n=1, cutoff=0.75)):
        raise ConfigError(f"{words[0]} is no subcommand: did you mean rlreason {near[0]}? (rlreason --help lists them)")


def subcommands_help() -> str:
    """Return the lines of `rlreason --help` about the subcommands."""
    lines = [f"  rlreason {f'{name} {takes}':<25} {line}" for name, (_, takes, line) in SUBCOMMANDS.items()]
    return "\n".join(sorted(lines))


def parser_of(subcommand: str) -> Parser:
    """Build the argument parser of a subcommand."""
    module = import_module(SUBCOMMANDS[subcommand][0])
    parser = Parser(prog=f"rlreason {subcommand}", description=module.__doc__)
    module.add_arguments(parser)
    help_json = "print the figures as JSON and nothing else; with FILE, write them there"
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=help_json)
    return parser


def run_subcommand(subcommand: str, words: Sequence[str]) -> int:
    """Run a subcommand, print its answer and return the exit code; `ConfigError` for a user's mistake.

    One is a run of discovery, or a sweep's folder where one run is read. Figures are written first: whoever reads the
    output may leave.
    """
    if LAST in words:
        reads_sweeps = SUBCOMMANDS[subcommand][1] in ("RUN ...", "RUN|SWEEP")
        words = [str(newest(RUNS, single=not reads_sweeps)) if word == LAST else word for word in words]
    arguments = parser_of(subcommand).parse_intermixed_args(words)
    one = [arguments.run] if "run" in arguments else []
    for folder in one or getattr(arguments, "runs", []):
        if (Path(folder) / CONVERSATION).exists() and subcommand not in ("report", "rerun"):
            raise ConfigError(f"RUN={folder} is a run of discovery: read its report.md, or use rlreason report")
    if one and (inner := runs_in(one[0])):
        raise ConfigError(f"RUN={one[0]} is no run and holds {len(inner)} of them: give one, such as {inner[-1]}")
    target = arguments.json
    to_file = target not in (None, STDOUT)
    if to_file:
        if "=" in target.partition("/")[0]:
            raise ConfigError(f"--json {target} is no name of a file: write --json behind the settings")
        refuse_target("--json", target)
    console = Console(out=sys.stderr if target == STDOUT else None)
    answer: Answer = import_module(SUBCOMMANDS[subcommand][0]).main(arguments, console)
    figures = answer.figures if isinstance(answer.figures, list) else {"verb": subcommand, **answer.figures}
    text = json.dumps(finite(figures), indent=1, default=str)
    if to_file:
        write_whole(Path(target), text + "\n")
    if target == STDOUT:
        print(text)
    elif answer.text:
        console.table(folded(answer.text, console.width) if console.live else answer.text)
    if to_file:
        console.say(f"figures: {target}")
    return answer.exit_code
