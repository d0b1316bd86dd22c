"""Check a module in a process of its own, so that a crash or a hang there is a result."""

import argparse
import importlib
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.machine import place_sockets
from rlreason.runtime.streams import Answer, Parser, number_in

LOOP, STEP = "train_grpo", "grpo_train_step"
SECONDS_TO_IMPORT = 120.0  # for a module, which may bring torch and vllm with it
COURSES = ("cs336_2025", "cs336_2026", "pku_hw3")
_OF_2026 = {  # names of functions and parameters
    "compute_rollout_rewards", "aggregate_loss_across_microbatch", STEP, "importance_reweighting_method",
    "advantage_normalizer",
}  # fmt: skip
_UNCHECKED = ("evaluate_vllm", "init_vllm", "load_policy_into_vllm_instance", "log_generations")


def names_of(course: str) -> list[str]:
    """Return the names of a course's functions that are checked, and of the loop."""
    names = importlib.import_module(f"rlreason.courses.{course}").__all__
    return [*(name for name in names if name not in _UNCHECKED), LOOP]


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that have a handout's name; `run_NAME` counts as NAME."""
    names = dict.fromkeys(names_of("cs336_2025") + names_of("cs336_2026"))
    pairs = [(name, getattr(module, name, None) or getattr(module, f"run_{name}", None)) for name in names]
    return {name: value for name, value in pairs if callable(value)}


def course_of(functions: Mapping[str, Callable[..., Any]]) -> str:
    """Return the year of these functions, by names and parameters that only one year has; 2025 by default."""
    parameters = {name for function in functions.values() for name in inspect.signature(function).parameters}
    return "cs336_2026" if _OF_2026 & (parameters | functions.keys()) else "cs336_2025"


def findings_of(name: str, function: Callable[..., Any], course: str) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the state of one function or loop, its bugs, as --json prints them, and notes on what was not tried.

    It runs the user's code in this process.
    """
    from rlreason.courses.check.calling import NotWrittenError
    from rlreason.courses.check.functions import SUBJECTS, examine
    from rlreason.courses.check.loop import SCENARIOS, STEP_SCENARIOS, check_loop

    notes: list[str] = []
    try:
        if name in (LOOP, STEP):
            bugs = check_loop(function, notes, SCENARIOS if name == LOOP else STEP_SCENARIOS)
        else:
            of_course = getattr(importlib.import_module(f"rlreason.courses.{course}"), name, None)
            named = [subject for subject in SUBJECTS if subject.ours.__name__ == name]
            bugs = examine(max(named, key=lambda subject: subject.ours is of_course), function)
    except NotWrittenError:
        return "not written", [], []
    return "bug" if bugs else "ok", [{"function": name, **asdict(bug)} for bug in bugs], notes


def check_module(module: str, course: str, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Return all results of a module, as --json prints them, with so many seconds for each function.

    `ConfigError` for a user's mistake. `report` takes what is being done. After a function that ended its process, a
    new process checks the rest.
    """
    place_sockets()
    began = time.monotonic()
    states, findings, notes = dict[str, str](), list[dict[str, Any]](), list[str]()
    with ProcessPool(1, 0, _start_worker, context=multiprocessing.get_context("forkserver")) as pool:

        def run(seconds: float, function: Callable[..., Any], *arguments: str) -> Any:
            """Return a result of `load` or `check_function`; how it ended the process is an error or a finding."""
            try:
                return pool.schedule(function, arguments, timeout=seconds).result()
            except ProcessExpired as error:
                end = f"ends the whole process (exit code {error.exitcode})"
            except TimeoutError:
                end = f"does not end: stopped after {seconds:g} s"
            if function is load:
                raise ConfigError(f"MODULE={module}: importing it {end}: mend that")
            where = "exit, os._exit, and loops whose end is never reached"
            finding = {"function": name, "kind": f"it {end}", "where": where, "yours": "", "ours": "", "inputs": {}}
            return "bug", [finding], []

        report("importing it")
        names, course, missing = run(SECONDS_TO_IMPORT, load, module, course)
        for name in names:
            report(f"checking {name}")
            run(SECONDS_TO_IMPORT, load, module, course)  # in a new process after one that ended
            states[name], found, noted = run(seconds, check_function, module, name, course)
            findings += found
            notes += [f"{name}: {note}" for note in noted]
    return {
        "module": module,
        "course": course,
        "functions": states,
        "missing": missing,
        "bugs": len(findings),
        "findings": findings,
        "notes": notes,
        "seconds": round(time.monotonic() - began, 2),
    }


def _start_worker() -> None:
    """Keep what the user's code prints out of the answer, and its threads few; import what takes seconds."""
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), number)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    import rlreason.courses.check.functions
    import rlreason.courses.check.loop  # noqa: F401

    torch.set_num_threads(1)


def load(module: str, course: str) -> tuple[list[str], str, list[str]]:
    """Import a module; return the functions that are checked, the course, and its functions that are missing."""
    functions = _functions(module)
    course = course or course_of(functions)
    return list(functions), course, [name for name in names_of(course) if name not in functions]


def check_function(module: str, name: str, course: str) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the findings of one function of a module."""
    return findings_of(name, _functions(module)[name], course)


@cache
def _functions(path_or_name: str) -> dict[str, Callable[..., Any]]:
    """Import `package.module`, or the module of a file `path/to/module.py`; `ConfigError` if that fails."""
    sys.path.insert(0, str(Path.cwd()))
    name = path_or_name
    try:
        if name.endswith(".py"):
            path = Path(name).resolve(strict=True)
            root = path.parent
            while (root / "__init__.py").is_file():  # a file of a package may import its neighbours with a dot
                root = root.parent
            sys.path[:0] = [str(root), str(path.parent), str(path.parent.parent)]
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            sys.modules.pop(name, None)  # of Python's own, or of another file
        functions = functions_of(importlib.import_module(name))
    except BaseException as error:  # also what ends a process, such as SystemExit
        from rlreason.courses.check.calling import their_error

        cure = "mend it, or give package.module or the path of a .py file"
        raise ConfigError(f"MODULE={path_or_name}: importing it fails: {their_error(error)}: {cure}") from None
    if not functions:
        names = ", ".join(dict.fromkeys(names_of("cs336_2025") + names_of("cs336_2026")))
        cure = "give the module that has some, as tests/adapters.py"
        raise ConfigError(f"MODULE={path_or_name} has none of the functions that are checked: {names}: {cure}")
    return functions


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason check`."""
    parser.add_argument("module", metavar="MODULE", help="package.module, or the path of a .py file")
    help_course = "the handout whose functions these are (told from their parameters)"
    parser.add_argument("--course", choices=COURSES, default="", help=help_course)
    seconds = number_in(0.1, 86400)
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="SECONDS", help="for each function (30)")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Check the module, and print what was found in each function."""
    with console.wait(f"checking {arguments.module}"):
        figures = check_module(arguments.module, arguments.course, arguments.timeout, console.part)
    states = figures["functions"]
    width = max(map(len, states)) + 2
    lines = [f"{name:<{width}}{'BUG' if state == 'bug' else state}" for name, state in states.items()]
    if figures["missing"]:
        lines.append(f"not in the module: {', '.join(figures['missing'])}")
    for finding in figures["findings"]:
        rows = {"where to look": finding["where"], **finding["inputs"]}
        rows |= {key: finding[key] for key in ("yours", "ours")}
        width = max(map(len, rows)) + 2
        lines += ["", f"BUG in {finding['function']}: {finding['kind']}"]
        lines += [f"  {name:<{width}}{value}" for name, value in rows.items() if value]
    for note in figures["notes"]:
        lines += ["", note]
    checked = sum(state != "not written" for state in states.values())
    bugs, seconds = figures["bugs"] or "no", figures["seconds"]
    lines += ["", f"{checked} checked as {figures['course']}, bugs found: {bugs} ({seconds:.1f} s)"]
    return Answer("\n".join(lines), figures, 1 if figures["bugs"] else 0)
