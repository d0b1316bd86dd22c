"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
from typing import Any

from rlreason.cli.doctor_checks import Examination, examine_machine
from rlreason.cli.doctor_findings import FAIL, WARN, Installed, installed, lines_of, version_findings
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.streams import Answer, Parser
from rlreason.runtime.text import first_line

PATIENCE_S = 60.0  # for an import: a minute suffices for a cold disk
MOST_PATIENCE = 3600.0
READ_BY = {"hydra-core", "omegaconf", "antlr4-python3-runtime"}  # needed to read settings


def add_arguments(parser: Parser) -> None:
    """Add the words of a run, and how long an import may take."""
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings of the run, as it would start")
    parser.add_argument(
        "--patience", type=_seconds, default=PATIENCE_S, metavar="S", help="seconds that an import may take (60)"
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_PATIENCE:
        raise ConfigError(f"--patience {word} must be a number of seconds, up to {MOST_PATIENCE:g}: try --patience 60")
    return seconds


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    there, what = installed(), "looking at libraries and GPUs"
    try:  # the imports too: OmegaConf cannot be imported with a wrong antlr4
        from rlreason.cli.doctor_checks import examine_run, requested_run

        request = requested_run(arguments.words, "doctor", console.say)
    except Exception as error:
        if not settings_unreadable(there):
            raise
        with console.wait(what):
            return answer(examine_machine(there, first_line(error), arguments.patience), console.width)
    with console.wait(what):
        return answer(examine_run(request, there, arguments.patience), console.width)


def settings_unreadable(there: Installed) -> bool:
    """Return whether a library that reads settings is itself broken, so that an error in them may be false."""
    return any(one.state == FAIL and one.name in READ_BY for one in version_findings(there))


def answer(looked: Examination, width: int) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    every = [one for findings in looked.sections.values() for one in findings]
    failed, warned = (sum(one.state == state for one in every) for state in (FAIL, WARN))
    lines: list[str] = []
    plan = None
    for title, findings in looked.sections.items():
        lines += [title, *lines_of(findings, width), ""]
    if looked.plan is not None:
        from rlreason.model.savings import figures, table

        plan = figures(looked.plan)
        lines += ["memory plan", *(f"  {line}" for line in table(looked.plan)), ""]
    told: dict[str, Any] = {
        "findings": [{"section": title} | one.figures() for title, found in looked.sections.items() for one in found],
        "memory": plan,
        "failed": failed,
        "warned": warned,
        "seconds": looked.seconds,
    }
    return Answer("\n".join([*lines, ending(failed, warned)]), told, 1 if failed else 0)


def ending(failed: int, warned: int) -> str:
    """Return the last line.

    >>> ending(0, 1), ending(2, 0)
    ('nothing is in the way; ? 1 to look at', '! 2 in the way')
    """
    start = f"! {failed} in the way" if failed else "nothing is in the way"
    return start + (f"; ? {warned} to look at" if warned else "")
