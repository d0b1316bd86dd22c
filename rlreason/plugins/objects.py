"""Python objects under names of the form `module:function`, as long as somebody needs them.

The name of an object that cannot be imported is made from its source, so that a run that is repeated has the same one.
"""

import hashlib
import inspect
import re
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlreason.errors import ConfigError

GIVEN = "python"  # stands in place of the module where an object has none that can be imported
PLAIN = (int, float, complex, str, bytes, bool, type(None))  # values whose text tells all of them

_known: dict[str, Any] = {}


@contextmanager
def known_as(thing: Any) -> Iterator[str]:
    """The name under which `load` finds the object inside the block."""
    if place := import_path(thing):
        yield place
        return
    name = label_of(thing)
    _known[name] = thing
    try:
        yield name
    finally:
        _known.pop(name, None)


def find(name: str) -> Any:
    """The object of that name, or None."""
    return _known.get(name)


def import_path(thing: Any) -> str | None:
    """`module:function` where a fresh process finds this very function under it; else None.

    >>> import_path(textwrap.dedent), import_path(lambda: 0)
    ('textwrap:dedent', None)
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(sys.modules.get(module), "__file__", None)
    spec = _spec(module) if found is thing else None
    with suppress(OSError):  # of a spec without a file
        if spec and spec.origin and file and Path(spec.origin).samefile(file):
            return f"{module}:{name}"
    return None


def label_of(thing: Any) -> str:
    """A name for an object that cannot be imported: what it is called, and a hash of its source and of all it holds.

    What holds something that cannot be hashed, such as a lock, has another name each time.
    """
    function = thing.func if isinstance(thing, partial) else getattr(thing, "function", thing)
    called = getattr(function, "__name__", type(function).__name__)
    try:
        state = _state(thing, {})
    except RecursionError:  # a long chain of objects
        state = uuid.uuid4().hex
    digest = hashlib.sha256(state.encode(errors="replace")).hexdigest()[:8]
    return f"{GIVEN}:{re.sub(r'[^0-9A-Za-z_]', '', called) or 'function'}-{digest}"


def _state(value: Any, seen: dict[int, tuple[int, Any]]) -> str:
    """A text that differs where two values may behave differently, and is the same in every process if it can be.

    `seen`: the number of each value on the way, and the value, so that it lives as long as its id is needed.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen:
        return f"number {seen[id(value)][0]} again"
    seen[id(value)] = len(seen), value
    held: list[Any]
    if (inspect.isroutine(value) or isinstance(value, type)) and (place := import_path(value)):
        return f"{place} {source_of(value)}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, list | tuple):
        held = list(value)
    elif isinstance(value, set | frozenset):
        held = sorted(_state(one, seen) for one in value)
    elif isinstance(value, dict):
        held = [part for item in value.items() for part in item]
    elif isinstance(value, partial):
        held = [value.func, value.args, value.keywords]
    elif inspect.ismethod(value):
        held = [value.__func__, value.__self__]
    elif inspect.isfunction(value):
        held = [value.__defaults__, value.__kwdefaults__]
        with suppress(TypeError, ValueError):
            names = inspect.getclosurevars(value)
            held += sorted({**names.globals, **names.nonlocals}.items())
        held.append(source_of(value) or value.__code__.co_code.hex())
    elif isinstance(value, type) or inspect.isroutine(value):
        held = [value.__module__, value.__qualname__, source_of(value)]
    elif hasattr(value, "__dict__") and _plainly_made(type(value)):
        held = [type(value), vars(value)]
    else:
        return _pickled(value)
    return f"{type(value).__name__}({', '.join(_state(one, seen) for one in held)})"


def _plainly_made(kind: Any) -> bool:
    """Whether all that an object of this class holds are its attributes: it has no part written in C, and no slots."""
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return plain and not any("__slots__" in vars(one) for one in kind.__mro__)


def _pickled(value: Any) -> str:
    import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:  # pickle's own, or that of an object which refuses
        return uuid.uuid4().hex


def source_of(thing: Any) -> str:
    """The source of a function, of what a `functools.partial` calls or of an object's class; empty where there is none.

    A `Loss` has its function's.
    """
    function = thing.func if isinstance(thing, partial) else getattr(thing, "function", thing)
    with suppress(TypeError, OSError):
        its_own = inspect.isroutine(function) or isinstance(function, type)
        return textwrap.dedent(inspect.getsource(function if its_own else type(function)))
    return ""


def written_source(name: str) -> str:
    """What a run keeps of a function by its name: the source of an object, else the file that its module lies in."""
    if (thing := find(name)) is not None:
        return source_of(thing) or "(the source cannot be had)\n"
    spec = _spec(name.partition(":")[0])
    try:
        return Path(spec.origin).read_text("utf-8") if spec and spec.origin else "(the source cannot be had)\n"
    except (OSError, UnicodeDecodeError):
        return f"(the source in {spec.origin if spec else name} is no text)\n"


def _spec(module: str) -> ModuleSpec | None:
    """Where Python would find a module now, whatever is loaded under that name already. Parents are not imported."""
    parts, places, spec = module.split("."), None, None
    for number in range(1, len(parts) + 1):
        name, spec = ".".join(parts[:number]), None
        with suppress(Exception):  # of a finder that somebody has installed
            spec = next((s for f in sys.meta_path if (s := f.find_spec(name, places))), None)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return spec


def for_workers(reward: str | Callable[..., Any]) -> tuple[str, bytes | None]:
    """(its name, how it travels to another process): None where that process can import it.

    Raises `ConfigError` for a function that cannot be sent.
    """
    thing = find(reward) if isinstance(reward, str) else reward
    if thing is None:
        return str(reward), None
    if not callable(thing):
        raise ConfigError(f"reward={thing!r:.60} is neither a name nor a function: give one")
    name = reward if isinstance(reward, str) else import_path(thing) or label_of(thing)
    if find(name) is None and import_path(thing):
        return name, None
    import cloudpickle

    try:
        return name, cloudpickle.dumps(thing)
    except Exception as error:  # pickle's own, or that of an object which refuses
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"reward={name} cannot be sent to the processes that grade ({reason}): take that out of the function, or "
            "write it into a file and name it module:function"
        ) from None
