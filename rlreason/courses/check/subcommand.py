"""Your own functions or train loop of a handout, held against ours: is there a bug, of which kind, and where to look?

MODULE (package.module, or the path of a .py file) holds functions by their handout names (compute_entropy ..., or
run_compute_entropy ... as in tests/adapters.py), a train loop `train_grpo`, or both. Each is tried on inputs that known
mistakes give away. A bug is shown by its kind and by the smallest inputs on which it shows; the solution is not.
docs/check.md has the signature of the loop. Exit code 1: a bug was found, 0: none.
"""

import argparse
import textwrap
from typing import Any

from rlreason.courses.check.runner import Checked, check_module
from rlreason.courses.check.subject import COURSES, LOOP
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.subcommand import Answer, Parser

WIDTH = 100


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason check`."""
    parser.add_argument("module", metavar="MODULE", help="package.module, or the path of a .py file")
    parser.add_argument(
        "--course",
        metavar="YEAR",
        help=f"{', '.join(COURSES)}: the handout whose functions these are (told from their parameters)",
    )
    parser.add_argument(
        "--timeout", type=float, default=6.0, metavar="SECONDS", help="of the processor, for each function (6)"
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Check the module."""
    course = arguments.course or ""
    if course and course not in COURSES:
        raise ConfigError(f"--course {course}: there is none of that name; choose one of {', '.join(COURSES)}")
    if not 0 < arguments.timeout <= 86400:
        raise ConfigError(f"--timeout {arguments.timeout:g} must be above 0 and at most 86400 seconds: give another")
    with console.wait(f"checking {arguments.module}") as wait:
        done = check_module(arguments.module, course, arguments.timeout, wait.part)
    figures = figures_of(arguments.module, done)
    return Answer(report_text(figures), figures, 1 if figures["bugs"] else 0)


def figures_of(module: str, done: Checked) -> dict[str, Any]:
    """Return all results for --json."""
    findings = [finding for result in done.results.values() for finding in result["findings"]]
    states = {name: result["state"] for name, result in done.results.items()}
    missing = [name for name in (*COURSES[done.course], LOOP) if name not in states]
    return {
        "module": module,
        "course": done.course,
        "functions": states,
        "missing": missing,
        "bugs": len(findings),
        "findings": findings,
        "notes": [f"{name}: {note}" for name, result in done.results.items() for note in result["notes"]],
        "seconds": round(done.seconds, 2),
    }


def report_text(figures: dict[str, Any]) -> str:
    """Return the same as text."""
    states = figures["functions"]
    width = max(map(len, states)) + 2
    lines = [f"{name:<{width}}{_STATE[state]}" for name, state in states.items()]
    if figures["missing"]:
        lines += textwrap.wrap(
            f"not in the module: {', '.join(figures['missing'])}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )
    for finding in figures["findings"]:
        lines += ["", *_finding_lines(finding)]
    lines += [""] * bool(figures["notes"])
    for note in figures["notes"]:
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    unwritten = sum(state == "not written" for state in states.values())
    checked = f"{len(states) - unwritten} checked as {figures['course']}"
    checked += f", {unwritten} not written yet" if unwritten else ""
    bugs = figures["bugs"]
    found = "no bug found" if not bugs else f"{bugs} bug{'s' * (bugs > 1)} found"
    lines += ["", f"{checked}: {found} ({figures['seconds']:.1f} s)"]
    return "\n".join(lines)


_STATE = {"ok": "ok", "bug": "BUG", "not written": "not written yet"}


def _finding_lines(finding: dict[str, Any]) -> list[str]:
    """Return one bug: kind, where to look, and the smallest example."""
    rows = [("where to look", finding["where"]), *finding["inputs"].items()]
    rows += [(label, finding[label]) for label in ("yours", "ours") if finding[label]]
    if finding["note"]:
        rows.append(("when", finding["note"]))
    width = max(len(name) for name, _ in rows) + 4
    lines = [f"BUG in {finding['function']}: {finding['kind']}"]
    for name, value in rows:
        wrapped = textwrap.wrap(value, max(40, WIDTH - width), break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"  {name:<{width - 2}}{wrapped[0]}")
        lines += [" " * width + line for line in wrapped[1:]]
    return lines
