"""Load users' rewards, data and losses: `module:function`, an entry point's name, or a Python object.

A run refers to each by a text of the form `module:function`; `load` finds it by that text.
"""

import difflib
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlreason.errors import ConfigError

NAMED_REWARDS = ("r1_zero", "question_only")
GIVEN = "python"  # the module's name in the text of an object that cannot be imported

_known: dict[str, Any] = {}  # name -> an object that cannot be imported, of the current run


def import_path(thing: Any) -> str | None:
    """Return `module:function` if another process can import this very function by it; else None.

    >>> import_path(textwrap.dedent), import_path(lambda: 0)
    ('textwrap:dedent', None)
    """
    name, qualified = getattr(thing, "__module__", None) or "__main__", getattr(thing, "__qualname__", "<")
    found: Any = sys.modules.get(name)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return f"{name}:{qualified}" if found is thing and name != "__main__" else None


def label_of(thing: Any) -> str:
    """Return a name for an object that cannot be imported: its own name, and a hash of its source and contents.

    An object with contents that cannot be hashed, such as a lock, gets another name each time.
    """
    called = getattr(_function_of(thing), "__name__", "")
    digest = hashlib.sha256(_state(thing, {}).encode(errors="replace")).hexdigest()[:8]
    return f"{GIVEN}:{re.sub(r'[^0-9A-Za-z_]', '', called) or 'function'}-{digest}"


def _function_of(thing: Any) -> Any:
    """Return the function of a `functools.partial` or a `Loss`, another object as it is."""
    return thing.func if isinstance(thing, partial) else getattr(thing, "function", thing)


def _state(value: Any, seen: dict[int, Any]) -> str:
    """Return a text that differs where two values may behave differently, and is the same in every process if possible.

    `seen`: id -> value, which keeps the id valid, for values that hold themselves.
    """
    if id(value) in seen:
        return "again"
    if isinstance(value, ModuleType):
        return value.__name__
    held: list[Any]
    kind: Any = type(value)
    if isinstance(value, list | tuple):
        held = list(value)
    elif isinstance(value, dict):
        held = [part for item in value.items() for part in item]
    elif isinstance(value, partial) or inspect.ismethod(value):
        held = list(value.__reduce__())
    elif (inspect.isroutine(value) or isinstance(value, type)) and (place := import_path(value)):
        return f"{place} {source_of(value)}"
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        held = [source_of(value) or value.__code__.co_code.hex(), value.__defaults__, value.__kwdefaults__]
        held += [names.globals, names.nonlocals]
    elif isinstance(value, type):
        held = [value.__qualname__, source_of(value)]
    elif kind.__reduce_ex__ is object.__reduce_ex__ and isinstance(getattr(value, "__dict__", None), dict):
        held = [kind, vars(value)]
    else:
        import cloudpickle

        try:
            return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
        except Exception:  # pickle's own, or that of an object which refuses
            return uuid.uuid4().hex
    seen[id(value)] = value
    return f"{kind.__name__}({', '.join(_state(one, seen) for one in held)})"


def source_of(thing: Any) -> str:
    """Return the source of a function or of an object's class; empty without one."""
    function = _function_of(thing)
    with suppress(TypeError, OSError):
        its_own = inspect.isroutine(function) or isinstance(function, type)
        return textwrap.dedent(inspect.getsource(function if its_own else type(function)))
    return ""


def written_source(name: str) -> str:
    """Return the source that a run records of a function: of a registered object, else its module's whole file."""
    if (thing := _known.get(name)) is not None:
        return source_of(thing)
    with suppress(Exception):  # of a finder, or no file
        spec: Any = find_spec(name.partition(":")[0])  # which does not import it
        return Path(spec.origin).read_text("utf-8")
    return ""


def for_workers(reward: str | Callable[..., Any]) -> tuple[str, bytes | None]:
    """Return a reward's name and its pickle for worker processes; None where they can import it.

    Raises `ConfigError` for a function that cannot be pickled.
    """
    thing = _known.get(reward) if isinstance(reward, str) else reward
    if thing is None:
        return str(reward), None
    if not callable(thing):
        raise ConfigError(f"reward={thing!r:.60} is neither a name nor a function: give one")
    if not isinstance(reward, str) and (place := import_path(thing)):
        return place, None
    import cloudpickle

    name = reward if isinstance(reward, str) else label_of(thing)
    try:
        return name, cloudpickle.dumps(thing)
    except Exception as error:  # of pickle, or of an object that refuses
        raise ConfigError(
            f"reward={name} cannot be sent to the processes that grade ({describe_error(error)}): take that out of the "
            "function, or write it into a file and name it module:function"
        ) from None


class NotImportableError(Exception):
    """Why a function cannot be loaded, as the end of a sentence that begins with its name."""


def load(name: str) -> Callable[..., Any]:
    """Load the function `module:function`: a registered object, or one from the current folder or Python's path.

    `NotImportableError` where that fails, with the place of the mistake or the cure.
    """
    if (given := _known.get(name)) is not None:
        return given  # type: ignore[no-any-return]
    module, _, function = name.partition(":")
    if module == GIVEN:
        raise NotImportableError(
            "it was a Python object of the program that started the run: give it again from Python (data=, reward= or "
            "loss=), or write a function's source (own_functions.txt of the run) into a file and name it "
            "module:function"
        )
    try:
        value: Any = importlib.import_module(module)
    except BaseException as error:  # also what ends a process, such as SystemExit
        cure = "fix that, or the name, or set PYTHONPATH to the module's folder"
        raise NotImportableError(f"importing {module} fails: {describe_error(error)}: {cure}") from None
    for part in function.split("."):
        near = difflib.get_close_matches(part, dir(value), n=1)
        value = getattr(value, part, None)
        if value is None:
            meant = f"did you mean {module}:{near[0]}?" if near else "write it there, or name another"
            raise NotImportableError(f"module {module} has no function {function}: {meant}")
    if not callable(value):
        raise NotImportableError(f"{function} in module {module} is of type {type(value).__name__}: name a function")
    return value  # type: ignore[no-any-return]


def find_modules_here() -> None:
    """Add the current folder to sys.path, as `python -m` does, so that a user's `module:function` is found.

    A script installed by pip has its own folder there instead. Python's own rule against it (`-P`, `-I`,
    PYTHONSAFEPATH) is respected. Processes that grade get the whole path; those of a sweep are started by `python -m`.
    """
    here = str(Path.cwd())
    if not sys.flags.safe_path and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def describe_error(error: BaseException) -> str:
    """Describe an error in the user's code: its type, its first line, and where in that code it was raised.

    >>> describe_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    ours = (str(Path(__file__).parents[1]), "<")  # the place is in neither this package nor Python's imports
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(ours) and "importlib" not in f.filename]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}".removesuffix(": ") + place


#: The settings that take an entry point's name for `module:function`, and the entry point's group.
GROUPS = {
    "loss": "rlreason.losses",
    "data": "rlreason.data",
    "prompt.reward": "rlreason.rewards",
    "eval.reward": "rlreason.rewards",
}


@cache
def announced(key: str) -> dict[str, str]:
    """Return name -> `module:function` of the entry points for a setting, without importing their packages.

    Of two packages with the same name, the first in the order of their places counts. They are read once: that takes
    10 ms.

    >>> announced("seed")
    {}
    """
    group = GROUPS.get(key)
    found = entry_points(group=group) if group else ()
    return {point.name: point.value.partition("[")[0].strip() for point in sorted(found, reverse=True)}


def names_function(text: str) -> bool:
    """Whether a text has the form `module:function`.

    >>> names_function("my_rewards:length"), names_function(":f"), names_function("my_rewards")
    (True, False, False)
    """
    return all(text.partition(":"))


def no_reward(key: str, reward: str, cure: str = "choose one") -> list[str]:
    """Return a complaint if a setting names no reward."""
    if reward in NAMED_REWARDS or names_function(reward):
        return []
    known = (*NAMED_REWARDS, *announced(key))
    if reward in known:  # the command line replaces it by the function; a file names it
        return [f"{key}={reward} is short for {announced(key)[reward]} on the command line: write that in a file"]
    near = difflib.get_close_matches(reward, known, n=1)
    cure = f"did you mean {key}={near[0]}?" if near else cure
    return [f"{key}={reward} is neither {' nor '.join(known)} nor module:function: {cure}"]


Data = str | Callable[..., Any] | Iterable[Any]  # a name, a function that makes rows, or the rows


@contextmanager
def as_settings(
    *, reward: str | Callable[..., Any] | None = None, loss: Any = None, data: Data | None = None
) -> Iterator[list[str]]:
    """Yield the overrides for these inside the block, such as `prompt.reward=module:function`.

    A function that can be imported is named by its path, so that a command line can repeat the run. Any other object
    is registered under a name until the end of the block. Raises `ConfigError` for what cannot be used.
    """
    if data is not None and not isinstance(data, str) and not callable(data):
        rows = data if isinstance(data, Mapping) or hasattr(data, "iterrows") else list(data)

        def rows_given() -> Any:
            """Rows that were given as a Python object. The run has their hash, `data_hash`, and no source of them."""
            return rows

        data = rows_given
    overrides = list[str]()
    try:
        for key, value in {"prompt.reward": reward, "loss": loss, "data": data}.items():
            if value is None:
                continue
            if not isinstance(value, str) and not callable(value):
                raise ConfigError(f"{key.rpartition('.')[2]}={value!r:.60} is no function: give one, or its name")
            name = value if isinstance(value, str) else import_path(value)
            if name is None:
                name = label_of(value)
                _known[name] = value
            overrides.append(f"{key}={name}")
        yield overrides
    finally:
        _known.clear()
