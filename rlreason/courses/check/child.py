"""The process that a user's functions run in: says over a pipe what it begins and what it found, one line of JSON each.

    python -m rlreason.courses.check.child FD MODULE COURSE SECONDS [SKIPPED ...]

What the user's code prints, raises, hangs in or ends with stays in here.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rlreason.courses.check.subject import COURSES, LOOP, SECONDS_TO_IMPORT, course_of, fits, functions_of, year_of

Said = dict[str, Any]


def main(words: list[str]) -> None:
    """Run the check of the arguments, and exit without waiting for threads of user code."""
    descriptor, module, course, seconds, *skipped = words
    channel = os.fdopen(int(descriptor), "w", encoding="utf-8", buffering=1)
    os.set_inheritable(int(descriptor), False)
    for said in checked(module, course, float(seconds), set(skipped)):
        channel.write(json.dumps(said) + "\n")
        channel.flush()
    channel.flush()
    os._exit(0)


def checked(word: str, course: str, seconds: float, skipped: set[str]) -> Iterator[Said]:
    """Check every function of a module but those in `skipped`; what happens, as records with a `say`."""
    from rlreason.courses.check.calling import NotLoadedError, load_module
    from rlreason.courses.check.runner import TimeUpError, time_limit

    yield {"say": "loading"}
    try:
        with time_limit(SECONDS_TO_IMPORT):
            functions = functions_of(load_module(word))
    except NotLoadedError as error:
        yield {"say": "mistake", "text": f"MODULE={word}: {error}"}
        return
    except TimeUpError:
        yield {
            "say": "mistake",
            "text": f"MODULE={word}: importing it takes longer than {SECONDS_TO_IMPORT:g} s: do less there",
        }
        return
    year = course or course_of(functions)
    if not functions:
        names = ", ".join((*dict.fromkeys([*COURSES["cs336_2025"], *COURSES["cs336_2026"]]), LOOP))
        yield {"say": "mistake", "text": f"MODULE={word} has none of the functions that are checked: {names}"}
        return
    if misfit := next((name for name in functions if course and not fits(name, functions[name], course)), ""):
        told = f"{misfit} has the parameters of {year_of(misfit, functions[misfit])}: leave --course out"
        yield {"say": "mistake", "text": f"--course {course}: {told}"}
        return
    yield {"say": "module", "course": year, "names": list(functions)}
    import torch

    import rlreason.courses.check.functions.registry  # seconds, which are no function's

    if {LOOP, "grpo_train_step", "get_response_log_probs"} & functions.keys():
        import rlreason.model.tiny  # noqa: F401

    torch.set_num_threads(1)
    for name, function in functions.items():
        if name not in skipped:
            yield {"say": "begin", "name": name}
            yield _of_function(name, function, year, seconds)
    yield {"say": "end"}


def _of_function(name: str, function: Callable[..., Any], course: str, seconds: float) -> Said:
    from rlreason.courses.check.runner import TimeUpError, time_limit
    from rlreason.courses.check.subject import Bug, NotWrittenError

    notes: list[str] = []
    try:
        with time_limit(seconds):
            findings = findings_of(name, function, course, notes)
    except NotWrittenError:
        return {"say": "done", "name": name, "state": "not written", "findings": [], "notes": []}
    except TimeUpError:
        kind = f"it does not end: stopped after {seconds:g} s"
        findings = [Bug(name, kind, "loops whose end is never reached")]
    state = "bug" if findings else "ok"
    return {"say": "done", "name": name, "state": state, "findings": [f.as_dict() for f in findings], "notes": notes}


def findings_of(name: str, function: Callable[..., Any], course: str, notes: list[str] | None = None) -> list[Any]:
    """Return the bugs of one function or loop; cases that were not tried are added to `notes`.

    Call it only in the process of the check, or in a test.
    """
    from rlreason.courses.check.calling import Yours
    from rlreason.courses.check.engine import examine
    from rlreason.courses.check.functions.registry import subject_of
    from rlreason.courses.check.loop.judge import problems

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
