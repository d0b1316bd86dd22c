"""Check a module in this process and write each event to a pipe, as one line of JSON.

    python -m rlreason.courses.check.child FD MODULE COURSE SECONDS [SKIPPED ...]

`runner` starts it: what the user's code prints, raises, hangs in or ends with stays in this process.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rlreason.courses.check.subject import (
    CHECKED_NAMES,
    LOOP,
    SECONDS_TO_IMPORT,
    course_of,
    fits,
    functions_of,
    year_of,
)

Event = dict[str, Any]  # has "event": loading, mistake, module, begin, done or end


def main(arguments: list[str]) -> None:
    """Check the module and exit, without waiting for threads of user code."""
    descriptor, module, course, seconds, *skipped = arguments
    channel = os.fdopen(int(descriptor), "w", encoding="utf-8", buffering=1)
    os.set_inheritable(int(descriptor), False)
    for event in events(module, course, float(seconds), set(skipped)):
        channel.write(json.dumps(event) + "\n")
        channel.flush()
    channel.flush()
    os._exit(0)


def events(path_or_name: str, course: str, seconds: float, skipped: set[str]) -> Iterator[Event]:
    """Check every function of a module but those in `skipped`; yield what happens."""
    from rlreason.courses.check.calling import NotLoadedError, load_module
    from rlreason.courses.check.runner import TimeUpError, time_limit

    yield {"event": "loading"}
    try:
        with time_limit(SECONDS_TO_IMPORT):
            functions = functions_of(load_module(path_or_name))
    except NotLoadedError as error:
        yield {"event": "mistake", "text": f"MODULE={path_or_name}: {error}"}
        return
    except TimeUpError:
        yield {
            "event": "mistake",
            "text": f"MODULE={path_or_name}: importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there",
        }
        return
    year = course or course_of(functions)
    if not functions:
        names = ", ".join(CHECKED_NAMES)
        yield {"event": "mistake", "text": f"MODULE={path_or_name} has none of the functions that are checked: {names}"}
        return
    if misfit := next((name for name in functions if course and not fits(name, functions[name], course)), ""):
        reason = f"{misfit} has the parameters of {year_of(misfit, functions[misfit])}: leave --course out"
        yield {"event": "mistake", "text": f"--course {course}: {reason}"}
        return
    yield {"event": "module", "course": year}
    import torch

    import rlreason.courses.check.cases_steps  # it takes seconds, which must not count for the first function

    if {LOOP, "grpo_train_step", "get_response_log_probs"} & functions.keys():
        import rlreason.model.tiny  # noqa: F401

    torch.set_num_threads(1)
    for name, function in functions.items():
        if name not in skipped:
            yield {"event": "begin", "name": name}
            yield _check_function(name, function, year, seconds)
    yield {"event": "end"}


def _check_function(name: str, function: Callable[..., Any], course: str, seconds: float) -> Event:
    from rlreason.courses.check.runner import TimeUpError, time_limit
    from rlreason.courses.check.subject import Bug, NotWrittenError

    notes: list[str] = []
    try:
        with time_limit(seconds):
            findings = findings_of(name, function, course, notes)
    except NotWrittenError:
        return {"event": "done", "name": name, "state": "not written", "findings": [], "notes": []}
    except TimeUpError:
        kind = f"it does not end: stopped after {seconds:g} s"
        findings = [Bug(name, kind, "loops whose end is never reached")]
    state = "bug" if findings else "ok"
    return {"event": "done", "name": name, "state": state, "findings": [f.as_dict() for f in findings], "notes": notes}


def findings_of(name: str, function: Callable[..., Any], course: str, notes: list[str] | None = None) -> list[Any]:
    """Return the bugs of one function or loop; add cases that were not tried to `notes`.

    It runs the user's code in this process.
    """
    from rlreason.courses.check.calling import Yours
    from rlreason.courses.check.cases_steps import subject_of
    from rlreason.courses.check.engine import examine
    from rlreason.courses.check.loop_judge import problems

    if name == LOOP:
        return problems(function, notes if notes is not None else [])
    subject = subject_of(name, function, course)
    yours = Yours(function, subject.parameters)
    findings = examine(subject, yours)
    if notes is not None:
        notes += yours.notes
    return findings


if __name__ == "__main__":
    main(sys.argv[1:])
