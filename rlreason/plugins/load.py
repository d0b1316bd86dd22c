"""A function of the user's own, named `module:function`: loaded, or in one line why it cannot be."""

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlreason.plugins.objects import GIVEN, find


class NotImportableError(Exception):
    """Why a function cannot be loaded, as the end of a sentence that begins with its name."""


def load(name: str) -> Callable[..., Any]:
    """The function `module:function`: a given object, or from the current folder or wherever Python finds modules."""
    if (given := find(name)) is not None:
        return given  # type: ignore[no-any-return]
    module, _, function = name.partition(":")
    if module == GIVEN:
        raise NotImportableError(
            "it was a Python object of the program that started the run, which keeps its source in its own_functions"
            ".txt: write that into a file and name it module:function, or give it again from Python"
        )
    value: Any = _module(module)
    place = getattr(value, "__file__", None) or "which comes with Python"
    for part in function.split("."):
        holder, value = value, getattr(value, part, None)
        if value is None:
            near = difflib.get_close_matches(part, [key for key in dir(holder) if not key.startswith("_")], n=1)
            wanted = function[: -len(part)] + near[0] if near else ""
            meant = f"did you mean {module}:{wanted}?" if near else "write it there, or name another"
            raise NotImportableError(f"module {module} ({place}) has no function {function}: {meant}")
    if not callable(value):
        raise NotImportableError(f"{function} in module {module} is of type {type(value).__name__}: name a function")
    return value  # type: ignore[no-any-return]


def judging(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, refused where it cannot be called with two values, as the grader does."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C nothing is known
        return function
    try:
        signature.bind("response", "reference answer")
    except TypeError as error:
        taken = str(signature) if len(str(signature)) < 60 else "(...)"
        raise NotImportableError(
            f"{name.partition(':')[2]}{taken} cannot be called with two texts ({error}): a reward takes (response, "
            "reference answer), a scorer (question, response)"
        ) from None
    return function


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise NotImportableError(_missing(name, error.name)) from None
        raise NotImportableError(f"importing {name} fails: {described(error)}: fix or install that") from None
    except BaseException as error:  # also what ends a process, such as SystemExit
        raise NotImportableError(f"importing {name} fails: {described(error)}: fix that") from None


def _missing(name: str, part: str) -> str:
    """A module that is nowhere, or lies in the current folder while Python does not look there."""
    here = Path.cwd()
    path = here.joinpath(*part.split("."))
    if (path.is_dir() or path.with_suffix(".py").is_file()) and str(here) not in map(_absolute, sys.path):
        return (
            f"module {name} lies in {here}, where Python does not look: set PYTHONPATH={here}, or start with "
            "python -m rlreason"
        )
    return (
        f"there is no module {part} in {here} or among the installed packages: fix the name, or set PYTHONPATH to the "
        "folder that it lies in"
    )


def _absolute(entry: str) -> str:
    return str(Path(entry).absolute())


def described(error: BaseException) -> str:
    """An error in the user's code: its kind, its first line, and where in that code it was raised.

    >>> described(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_theirs(f.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}".removesuffix(": ") + place


def _is_theirs(file: str) -> bool:
    """Whether a file may be the user's: neither one of this package nor Python's machinery for imports."""
    return not file.startswith("<") and Path(__file__).parents[1] not in Path(file).parents and "importlib" not in file
