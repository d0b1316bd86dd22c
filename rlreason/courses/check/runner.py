"""Check a module in a process of its own, so that a crash or a hang there is a result."""

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlreason.courses.check.subject import (
    CHECKED_NAMES,
    COURSES,
    LOOP,
    SECONDS_TO_IMPORT,
    Bug,
    NotWrittenError,
    TimeUpError,
    course_of,
    fits,
    functions_of,
    time_limit,
    year_of,
)
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
        check.results[function] = {"state": "bug", "findings": [asdict(Bug(function, kind, where))], "notes": []}
    check.duration = time.monotonic() - began
    return check


def _check_rest(check: Check) -> tuple[str, str] | None:
    """Check the functions that have no result yet in one process; return the function it died in and how, or None."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as errors:
        arguments = (send, errors.name, check.module, check.course, check.seconds, set(check.results))
        process = context.Process(target=_run_child, args=arguments)
        process.start()
        send.close()
        try:
            return _follow(process, receive, check, Path(errors.name))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # what it has started, too
            process.kill()
            process.join()
            receive.close()


def _follow(process: BaseProcess, receive: Connection, check: Check, errors: Path) -> tuple[str, str] | None:
    """Take in the events of the process until its end; return the function it died in and how, or None."""
    current, limit = "", SECONDS_TO_IMPORT
    while receive.poll(2 * limit + GRACE):
        try:
            event = json.loads(receive.recv_bytes())
        except EOFError:
            return _ended(process, check.module, current, errors)
        match event["event"]:
            case "end":
                return None
            case "mistake":
                raise ConfigError(event["text"])
            case "loading":
                check.report("importing it")
            case "module":
                check.course = event["course"]
            case "begin":
                current, limit = str(event["name"]), check.seconds
                check.report(f"checking {current}")
            case "done":
                check.results[current] = {key: event[key] for key in ("state", "findings", "notes")}
                current = ""
    if not current:
        late = f"importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there"
        raise ConfigError(f"MODULE={check.module}: {late}")
    return current, f"it does not end: stopped after {check.seconds:g} s"


def _ended(process: BaseProcess, module: str, current: str, errors: Path) -> tuple[str, str]:
    """Return the function that ended the process, and how; `ConfigError` if importing the module did."""
    process.join()
    code = process.exitcode or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if current:
        return current, f"it ends the whole process ({how})"
    last = errors.read_text("utf-8", "replace").strip().splitlines()
    tail = f": {last[-1]}" if last else ""
    raise ConfigError(f"MODULE={module}: importing it ends the whole process ({how}){tail}: do not exit there")


Event = dict[str, Any]  # has "event": loading, mistake, module, begin, done or end


def _run_child(send: Connection, errors: str, module: str, course: str, seconds: float, skipped: set[str]) -> None:
    """Check a module in this process, send each event, and exit without waiting.

    What the user's code prints, raises, hangs in or ends with stays in this process.
    """
    os.setsid()
    for number, (path, mode) in enumerate(
        ((os.devnull, os.O_RDONLY), (os.devnull, os.O_WRONLY), (errors, os.O_WRONLY))
    ):
        os.dup2(os.open(path, mode), number)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for event in events(module, course, seconds, skipped):
        send.send_bytes(json.dumps(event).encode())
    os._exit(0)


def events(module: str, course: str, seconds: float, skipped: set[str]) -> Iterator[Event]:
    """Check every function of a module but those in `skipped`; yield what happens."""
    yield {"event": "loading"}
    try:
        functions, year = _load(module, course)
    except ConfigError as error:
        yield {"event": "mistake", "text": str(error)}
        return
    yield {"event": "module", "course": year}
    import torch

    import rlreason.courses.check.train_step  # it takes seconds, which must not count for the first function

    if {LOOP, "grpo_train_step", "get_response_log_probs"} & functions.keys():
        import rlreason.model.parameters  # noqa: F401

    torch.set_num_threads(1)
    for name, function in functions.items():
        if name not in skipped:
            yield {"event": "begin", "name": name}
            yield _check_function(name, function, year, seconds)
    yield {"event": "end"}


def _load(module: str, course: str) -> tuple[dict[str, Callable[..., Any]], str]:
    """Return the functions of a module that are checked, and the course; `ConfigError` for a user's mistake."""
    from rlreason.courses.check.calling import load_module

    try:
        with time_limit(SECONDS_TO_IMPORT):
            functions = functions_of(load_module(module))
    except TimeUpError:
        late = f"importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there"
        raise ConfigError(f"MODULE={module}: {late}") from None
    if not functions:
        names = ", ".join(CHECKED_NAMES)
        raise ConfigError(f"MODULE={module} has none of the functions that are checked: {names}")
    if misfit := next((name for name in functions if course and not fits(name, functions[name], course)), ""):
        reason = f"{misfit} has the parameters of {year_of(misfit, functions[misfit])}: leave --course out"
        raise ConfigError(f"--course {course}: {reason}")
    return functions, course or course_of(functions)


def _check_function(name: str, function: Callable[..., Any], course: str, seconds: float) -> Event:
    notes: list[str] = []
    try:
        with time_limit(seconds):
            findings = findings_of(name, function, course, notes)
    except NotWrittenError:
        return {"event": "done", "state": "not written", "findings": [], "notes": []}
    except TimeUpError:
        kind = f"it does not end: stopped after {seconds:g} s"
        findings = [Bug(name, kind, "loops whose end is never reached")]
    state = "bug" if findings else "ok"
    return {"event": "done", "state": state, "findings": [asdict(finding) for finding in findings], "notes": notes}


def findings_of(name: str, function: Callable[..., Any], course: str, notes: list[str] | None = None) -> list[Any]:
    """Return the bugs of one function or loop; add cases that were not tried to `notes`.

    It runs the user's code in this process.
    """
    from rlreason.courses.check.calling import Yours
    from rlreason.courses.check.loop_judge import problems
    from rlreason.courses.check.observing import examine
    from rlreason.courses.check.train_step import subject_of

    if name == LOOP:
        return problems(function, notes if notes is not None else [])
    subject = subject_of(name, function, course)
    yours = Yours(function, subject.parameters)
    findings = examine(subject, yours)
    if notes is not None:
        notes += yours.notes
    return findings


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
