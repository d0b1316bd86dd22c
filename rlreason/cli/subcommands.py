"""The verbs: `rlreason VERB ...` reads what runs have left; `rerun` alone starts one, by the words of another.

One table stands behind dispatch, --help and suggestions.

A verb is one line of `VERBS` and its module, whose docstring `rlreason VERB --help` shows and which offers

    add_arguments(parser)                 its options; `parser.add_run` adds RUN, the folder of a run
    main(arguments, console) -> Answer    what it found out; `console` shows what is waited for

`--json` is the same for all: it prints the figures alone, and `--json FILE` writes them.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
from rlreason.records.files import CONVERSATION, finite
from rlreason.records.reader import refuse_unbegun, runs_in
from rlreason.runtime.files import ELSEWHERE, write_whole
from rlreason.runtime.subcommand import Answer, Parser, refuse_target

STDOUT = "-"  # as the FILE of --json


class Verb(NamedTuple):
    """A verb, the module that does it, what is given to it, and what it is for in one line."""

    name: str
    module: str
    takes: str
    line: str


VERBS = (
    Verb("inspect", "rlreason.cli.inspect", "RUN", "responses, with a guess at what went wrong in each"),
    Verb("report", "rlreason.cli.report", "RUN ...", "verdicts, curves and tables of runs and sweeps, as a page"),
    Verb(
        "compare", "rlreason.report.compare", "RUN ...", "which setting is better, by how much, or that nobody can tell"
    ),
    Verb(
        "score",
        "rlreason.discovery.score",
        "PROGRAM",
        "a program of discovery: run in a sandbox, its set checked exactly",
    ),
    Verb("health", "rlreason.health.subcommand", "RUN ...", "what is wrong with a run: evidence, causes, what to try"),
    Verb(
        "doctor",
        "rlreason.cli.doctor.subcommand",
        "[WORD ...]",
        "what this machine can do, and whether a run of these words fits",
    ),
    Verb(
        "check",
        "rlreason.courses.check.subcommand",
        "MODULE",
        "your own functions or train loop of a handout, held against ours",
    ),
    Verb("curves", "rlreason.cli.curves", "RUN", "draw curves.png again, also of a run that is under way"),
    Verb(
        "plan",
        "rlreason.cli.plan",
        "[WORD ...]",
        "the memory of a run of these words; --seeds S: what they can show",
    ),
    Verb(
        "rerun",
        "rlreason.cli.rerun",
        "RUN [WORD ...]",
        "start it again: what differs here, and in what it comes to",
    ),
    Verb("completion", "rlreason.cli.completion", "SHELL", "what makes bash, fish or zsh complete words with Tab"),
)
#: Ways to use a verb that have a line of their own in --help.
WAYS = (
    ("inspect RUN --regrade", "grade its rollouts again: now, with math-verify, or with a function of yours"),
    ("inspect RUN --gradients", "its rollouts under every objective: loss, gradient, clipping"),
)
#: First words that are no verbs here: what to type for them.
MEANT = {"lab": "rlreason inspect RUN --gradients", "audit": "rlreason inspect RUN --regrade", "train": "rlreason"}


def named_verb(words: Sequence[str]) -> Verb | None:
    """The verb that a command line begins with, if it does."""
    return next((verb for verb in VERBS if [verb.name] == list(words[:1])), None)


def refuse_wrong_verb(words: Sequence[str]) -> None:
    """`ConfigError` where the first word is nearly a verb. An override has an equals sign, and a verb has none.

    >>> refuse_wrong_verb(["inspct", "runs/a"])
    Traceback (most recent call last):
    rlreason.errors.ConfigError: inspct is no verb: did you mean rlreason inspect? (rlreason --help lists the verbs)
    """
    if not words or not re.fullmatch(r"[A-Za-z][\w-]*", words[0]):
        return
    near = difflib.get_close_matches(words[0].lower(), [verb.name for verb in VERBS], n=1, cutoff=0.75)
    if meant := MEANT.get(words[0].lower()) or (f"rlreason {near[0]}" if near else ""):
        raise ConfigError(f"{words[0]} is no verb: did you mean {meant}? (rlreason --help lists the verbs)")


def verbs_help() -> str:
    """The lines of `rlreason --help` about the verbs."""
    rows = [(f"{verb.name} {verb.takes}", verb.line) for verb in VERBS] + list(WAYS)
    return "\n".join(f"  rlreason {usage:<25} {line}" for usage, line in sorted(rows))


def parser_of(verb: Verb) -> Parser:
    """The parser of a verb's words."""
    module = import_module(verb.module)
    parser = Parser(prog=f"rlreason {verb.name}", description=module.__doc__)
    module.add_arguments(parser)
    help_json = "print the figures as JSON and nothing else; with FILE, write them there"
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=help_json)
    return parser


def run_verb(verb: Verb, words: Sequence[str]) -> int:
    """Do what `rlreason VERB WORDS` asks and show its answer; returns the exit code.

    `ConfigError` for a user's mistake.
    """
    module = import_module(verb.module)
    arguments = parser_of(verb).parse_args(_json_alone(words))
    refuse_no_run(arguments, verb.name)
    target = arguments.json
    if target not in (None, STDOUT):
        refuse_target("--json", target)
    console = Console(out=sys.stderr if target == STDOUT else None)
    try:
        answer: Answer = module.main(arguments, console)
    except UnwritableError as error:
        error.args = (str(error).replace(ELSEWHERE, ""),)  # a setting of runs, which no verb has
        raise
    told = answer.figures if isinstance(answer.figures, list) else {"verb": verb.name, **answer.figures}
    figures = json.dumps(finite(told), indent=1, default=str)
    if target == STDOUT:
        print(figures.replace("\x7f", "\\u007f"))  # the one control character that JSON leaves as it is
        return answer.exit_code
    if answer.text:
        console.table(answer.text)
    if target:
        write_whole(Path(target), figures + "\n")
        console.say(f"figures: {target}")
    return answer.exit_code


def refuse_no_run(arguments: argparse.Namespace, verb: str) -> None:
    """`ConfigError` for a run that never began, and for a sweep's folder where one run is read."""
    for folder in [arguments.run] if "run" in arguments else getattr(arguments, "runs", []):
        if verb != "health":  # which says why such a run never began
            refuse_unbegun(folder)
        if (Path(folder) / CONVERSATION).exists() and verb not in ("report", "rerun"):
            raise ConfigError(
                f"RUN={folder} is a run of discovery, which rlreason {verb} cannot read: read its report.md, or its "
                f"{CONVERSATION}; several of them: rlreason report RUN RUN"
            )
    if inner := runs_in(arguments.run) if "run" in arguments else []:
        raise ConfigError(
            f"RUN={arguments.run} is no run and holds {len(inner)} of them: give one, such as {inner[-1]}"
        )


def _json_alone(words: Sequence[str]) -> list[str]:
    """The words with a `-` after a `--json` that a folder follows: it is RUN, not FILE, unless RUN stands before.

    >>> _json_alone(["--json", "/"]), _json_alone(["/", "--json"]), _json_alone(["/", "--json", "a.json"])
    (['--json', '-', '/'], ['/', '--json'], ['/', '--json', 'a.json'])
    """
    out: list[str] = []
    for word in words:
        is_run = os.path.isdir(word) and not any(map(os.path.isdir, out))
        out += [STDOUT, word] if out[-1:] == ["--json"] and is_run else [word]
    return out
