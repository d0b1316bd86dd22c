"""Check a module in a process of its own, so that a crash or a hang there is a result."""

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rlreason.courses.check.subject import COURSES, LOOP, SECONDS_TO_IMPORT
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.streams import Answer, Parser

GRACE = 2.0  # beyond the child's own limit, for code that cannot be interrupted from within


@dataclass
class Check:
    """A module to check, and its results so far."""

    module: str
    course: str  # "" until the functions tell it
    seconds: float  # for each function at most
    report: Callable[[str], None]  # takes what is being done
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # function -> state, findings and notes
    duration: float = 0.0


def check_module(module: str, course: str, seconds: float, report: Callable[[str], None]) -> Check:
    """Check a module's functions, each for so many seconds at most; `ConfigError` for a user's mistake.

    After a function that ended its process, a new process checks the rest.
    """
    check, began = Check(module, course, seconds, report), time.monotonic()
    while death := _check_rest(check):
        function, kind = death
        where = "exit, os._exit and what is done to memory"
        if kind.startswith("it does not end:"):
            where = "loops whose end is never reached"
        finding: dict[str, Any] = {"function": function, "kind": kind, "where": where}
        finding |= {"inputs": {}, "yours": "", "ours": "", "note": ""}
        check.results[function] = {"state": "bug", "findings": [finding], "notes": []}
    check.duration = time.monotonic() - began
    return check


def _check_rest(check: Check) -> tuple[str, str] | None:
    """Check the functions that have no result yet in one process; return the function it died in and how, or None."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "rlreason.courses.check.child", str(write)]
    command += [check.module, check.course, str(check.seconds), *check.results]
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, pass_fds=[write], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(write)
    try:
        return _follow(process, read, check)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(read)
        if process.stderr is not None:
            process.stderr.close()


def _follow(process: subprocess.Popen[bytes], read: int, check: Check) -> tuple[str, str] | None:
    """Take in the events of the process until its end; return the function it died in and how, or None."""
    assert process.stderr is not None
    buffer, errors, current = b"", b"", ""
    deadline = time.monotonic() + 2 * SECONDS_TO_IMPORT
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if key.fd != read:
                    errors = (errors + chunk)[-4000:]
                    if not chunk:
                        selector.unregister(process.stderr)
                    continue
                if not chunk:
                    return _ended(process, check.module, current, errors)
                *lines, buffer = (buffer + chunk).split(b"\n")
                for event in map(json.loads, lines):
                    if event["event"] == "end":
                        return None
                    current = _take_in(event, check, current)
                    limit = SECONDS_TO_IMPORT if event["event"] in ("loading", "module") else check.seconds
                    deadline = time.monotonic() + 2 * limit + GRACE
    if not current:
        late = f"importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there"
        raise ConfigError(f"MODULE={check.module}: {late}")
    return current, f"it does not end: stopped after {check.seconds:g} s"


def _take_in(event: dict[str, Any], check: Check, current: str) -> str:
    """Record an event of the process; return the function that it is checking."""
    match event["event"]:
        case "mistake":
            raise ConfigError(event["text"])
        case "loading":
            check.report("importing it")
        case "module":
            check.course = event["course"]
        case "begin":
            check.report(f"checking {event['name']}")
            return str(event["name"])
        case "done":
            check.results[event["name"]] = {key: event[key] for key in ("state", "findings", "notes")}
            return ""
    return current


def _ended(process: subprocess.Popen[bytes], module: str, current: str, errors: bytes) -> tuple[str, str]:
    """Return the function that ended the process, and how; `ConfigError` if importing the module did."""
    code = process.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if current:
        return current, f"it ends the whole process ({how})"
    last = errors.decode("utf-8", "replace").strip().splitlines()
    tail = f": {last[-1]}" if last else ""
    raise ConfigError(f"MODULE={module}: importing it ends the whole process ({how}){tail}: do not exit there")


class TimeUpError(BaseException):
    """The time limit of a function has passed. Not an `Exception`, so that user code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUpError` in the block after so many seconds of the processor, or twice as many by the clock.

    So a busy machine does not make a right function look like one that hangs.
    """

    def up(number: int, frame: object) -> NoReturn:
        raise TimeUpError

    before = [signal.signal(number, up) for number in (signal.SIGALRM, signal.SIGPROF)]
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)  # again and again, for code that catches everything
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds, 0.2)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)


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
        check = check_module(arguments.module, course, arguments.timeout, wait.part)
    figures = figures_of(check)
    return Answer(report_text(figures), figures, 1 if figures["bugs"] else 0)


def figures_of(check: Check) -> dict[str, Any]:
    """Return all results for --json."""
    findings = [finding for result in check.results.values() for finding in result["findings"]]
    states = {name: result["state"] for name, result in check.results.items()}
    return {
        "module": check.module,
        "course": check.course,
        "functions": states,
        "missing": [name for name in (*COURSES[check.course], LOOP) if name not in states],
        "bugs": len(findings),
        "findings": findings,
        "notes": [f"{name}: {note}" for name, result in check.results.items() for note in result["notes"]],
        "seconds": round(check.duration, 2),
    }


def report_text(figures: dict[str, Any]) -> str:
    """Return the results as text."""
    states = figures["functions"]
    width = max(map(len, states)) + 2
    lines = [f"{name:<{width}}{_STATE[state]}" for name, state in states.items()]
    if figures["missing"]:
        lines += _wrap(f"not in the module: {', '.join(figures['missing'])}")
    for finding in figures["findings"]:
        lines += ["", *_finding_lines(finding)]
    if figures["notes"]:
        lines.append("")
    for note in figures["notes"]:
        lines += _wrap(note)
    unwritten = sum(state == "not written" for state in states.values())
    checked = f"{len(states) - unwritten} checked as {figures['course']}"
    if unwritten:
        checked += f", {unwritten} not written yet"
    bugs = {0: "no bug", 1: "1 bug"}.get(figures["bugs"], f"{figures['bugs']} bugs")
    lines += ["", f"{checked}: {bugs} found ({figures['seconds']:.1f} s)"]
    return "\n".join(lines)


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


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
