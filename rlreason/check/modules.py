"""The user's module: found by its dotted name or by the path of its file, loaded, or in one line why not."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rlreason.check.limit import TimeUpError
from rlreason.check.words import their_error


class NotLoadedError(Exception):
    """Why a module cannot be loaded, as the end of a sentence that begins with its name."""


def load_module(word: str) -> ModuleType:
    """The module `package.module`, or that of a file `path/to/module.py`; `NotLoadedError` where it cannot be had."""
    path = Path(word)
    if word.endswith(".py") or path.is_file():
        return _of_file(path)
    if path.is_dir():
        inner = next((p.name for p in sorted(path.glob("*.py"))), "module.py")
        raise NotLoadedError(f"is a folder: give a file of it, such as {path / inner}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(word.replace("/", "."))
    except ModuleNotFoundError as error:
        if error.name is not None and (word == error.name or word.startswith(f"{error.name}.")):
            raise NotLoadedError(
                f"there is no module {error.name} in {here} or among the installed packages: fix the name, or give "
                "the path of a .py file"
            ) from None
        raise NotLoadedError(f"importing it fails: {their_error(error)}: fix or install that") from None
    except BaseException as error:  # also what ends a process, such as SystemExit
        if isinstance(error, TimeUpError):
            raise
        raise NotLoadedError(f"importing it fails: {their_error(error)}: fix that") from None


def _of_file(path: Path) -> ModuleType:
    """The module of a file; its folder and those above that hold its package can be imported from."""
    if not path.is_file():
        raise NotLoadedError("is no file: give the path of a .py file, or the dotted name of a module")
    path = path.resolve()
    root = path.parent
    for folder in (path.parent, path.parent.parent, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    while (root / "__init__.py").is_file():
        root = root.parent
    if root != path.parent:  # a file of a package may import its neighbours with a dot
        sys.path.insert(0, str(root))
        name = ".".join(path.relative_to(root).with_suffix("").parts)
    else:
        name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NotLoadedError("is no file of Python: give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if isinstance(error, TimeUpError):
            raise
        raise NotLoadedError(f"importing it fails: {their_error(error)}: fix that") from None
    return module
