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
from rlreason.runtime.subcommand import Answer, Parser

GRACE = 2.0  # beyond the child's own limit, for code that cannot be interrupted from within


@dataclass
class Checked:
    """The results of a module."""

    course: str = ""
    names: list[str] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> state, findings and notes
    seconds: float = 0.0


def check_module(module: str, course: str, seconds: float, report: Callable[[str], None]) -> Checked:
    """Check a module's functions, each for so many seconds at most; `ConfigError` for a user's mistake.

    After a function that took its process with it, another process goes on with those that are left.
    """
    done, began = Checked(), time.monotonic()
    while True:
        died_in = _one_process(module, course, seconds, done, report)
        if died_in is None:
            break
        done.results[died_in[0]] = {"state": "bug", "findings": [_death(*died_in)], "notes": []}
    done.seconds = time.monotonic() - began
    return done


def _death(name: str, how: str) -> dict[str, Any]:
    where = {"it does not end": "loops whose end is never reached"}.get(
        how.partition(":")[0], "exit, os._exit and what is done to memory"
    )
    return {"function": name, "kind": how, "where": where, "inputs": {}, "yours": "", "ours": "", "note": ""}


def _one_process(
    module: str, course: str, seconds: float, done: Checked, report: Callable[[str], None]
) -> tuple[str, str] | None:
    """Let one process check what is left; return the function in which it died, and how, or None."""
    read, write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "rlreason.courses.check.child",
        str(write),
        module,
        course,
        str(seconds),
        *done.results,
    ]
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, pass_fds=[write], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(write)
    try:
        return _followed(process, read, module, seconds, done, report)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(read)
        if process.stderr is not None:
            process.stderr.close()


def _followed(
    process: subprocess.Popen[bytes],
    read: int,
    module: str,
    seconds: float,
    done: Checked,
    report: Callable[[str], None],
) -> tuple[str, str] | None:
    assert process.stderr is not None
    said, errors, now, until = b"", b"", "", time.monotonic() + 2 * SECONDS_TO_IMPORT
    with selectors.DefaultSelector() as waiting:
        waiting.register(read, selectors.EVENT_READ)
        waiting.register(process.stderr, selectors.EVENT_READ)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return _late(module, now, seconds)
            for key, _ in waiting.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if key.fd != read:
                    errors = (errors + chunk)[-4000:]
                    if not chunk:
                        waiting.unregister(process.stderr)
                    continue
                if not chunk:
                    return _ended(process, module, now, errors)
                said += chunk
                *lines, said = said.split(b"\n")
                for line in lines:
                    record = json.loads(line)
                    now = _noted(record, done, report, now)
                    limit = SECONDS_TO_IMPORT if record["event"] in ("loading", "module") else seconds
                    until = time.monotonic() + 2 * limit + GRACE
                    if record["event"] == "end":
                        return None


def _noted(record: dict[str, Any], done: Checked, report: Callable[[str], None], now: str) -> str:
    """Record a message of the process; return the function that it is checking."""
    match record["event"]:
        case "mistake":
            raise ConfigError(record["text"])
        case "loading":
            report("importing it")
        case "module":
            done.course, done.names = record["course"], record["names"]
        case "begin":
            report(f"checking {record['name']}")
            return str(record["name"])
        case "done":
            done.results[record["name"]] = {key: record[key] for key in ("state", "findings", "notes")}
            return ""
    return now


def _late(module: str, now: str, seconds: float) -> tuple[str, str]:
    if not now:
        raise ConfigError(f"MODULE={module}: importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there")
    return now, f"it does not end: stopped after {seconds:g} s"


def _ended(process: subprocess.Popen[bytes], module: str, now: str, errors: bytes) -> tuple[str, str]:
    code = process.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if now:
        return now, f"it ends the whole process ({how})"
    last = errors.decode("utf-8", "replace").strip().splitlines()
    tail = f": {last[-1]}" if last else ""
    raise ConfigError(f"MODULE={module}: importing it ends the whole process ({how}){tail}: do not exit there")


class TimeUpError(BaseException):
    """The time limit of a function has passed. Not an `Exception`, so that user code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUpError` in what is inside once so many seconds of the processor, or twice as many, have passed.

    On a machine that is busy with other things a right function is not taken for one that hangs.
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
