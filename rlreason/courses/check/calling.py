"""Load the user's module, and call its functions by the handout's names within a time limit."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.runner import TimeUpError
from rlreason.courses.check.subject import Fault, Kind, UnwrittenFault, short_text, their_error


class Yours:
    """The user's function, called by the handout's names, or by position if it has others."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[str]) -> None:
        self.function, self.positions = function, dict[str, int]()
        self.accepted: set[str] | None = None  # None: every keyword
        self.defaults: set[str] = set()
        self.notes: list[str] = []  # cases that were not tried, and what is no bug but worth a look
        self.lacks: list[str] = []  # the handout's parameters that it does not have
        self.demands: list[str] = []  # its own parameters that get no argument
        try:
            own = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return
        if any(p.kind is p.VAR_KEYWORD for p in own) or any(p.kind is p.VAR_POSITIONAL for p in own):
            self.defaults = {p.name for p in own if p.default is not p.empty}
            if not any(p.kind is p.VAR_KEYWORD for p in own):
                self.positions = {name: i for i, name in enumerate(parameters)}
            return
        self._match(own, parameters)

    def _match(self, own: list[inspect.Parameter], parameters: Sequence[str]) -> None:
        """Pair the handout's names with the function's: equal names first, the others by position."""
        names = {p.name for p in own if p.kind is not p.POSITIONAL_ONLY}
        self.accepted = set(parameters) & names
        places = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        if len(self.accepted) < len(parameters) and len(places) >= len(parameters):
            self.positions = {name: i for i, name in enumerate(parameters)}
            self.accepted = set(parameters)
            self.defaults = {n for n, p in zip(parameters, places, strict=False) if p.default is not p.empty}
            rest = own[len(parameters) :]
        else:
            self.lacks = [name for name in parameters if name not in self.accepted]
            self.defaults = {p.name for p in own if p.default is not p.empty}
            rest = [p for p in own if p.name not in self.accepted]
        self.demands = [
            p.name for p in rest if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]

    def check_signature(self) -> None:
        """Raise `Fault` if the signature cannot take the handout's arguments."""
        if self.lacks:
            names = ", ".join(self.lacks)
            kind = Kind(f"its parameters do not fit the handout: there is none called {names}", "the def line")
            raise Fault(kind, f"takes {inspect.signature(self.function)}")
        if self.demands:
            names = ", ".join(self.demands)
            name = f"its parameters do not fit the handout: it asks for {names}, which nobody gives"
            raise Fault(Kind(name, "the def line"))

    def __call__(self, **given: Any) -> Any:
        """Return its answer; `Fault` if it raises or changes its inputs."""
        copies = {name: _copy(value) for name, value in given.items()}
        flags = {name: value.requires_grad for name, value in given.items() if isinstance(value, Tensor)}
        try:
            if self.positions:
                order = sorted(given, key=lambda name: self.positions[name])
                gap = next((i for i, name in enumerate(order) if self.positions[name] != i), len(order))
                by_name = {name: given[name] for name in order[gap:]}
                answer = self.function(*(given[name] for name in order[:gap]), **by_name)
            else:
                answer = self.function(**given)
        except TimeUpError:
            raise
        except BaseException as error:  # also SystemExit: whatever a stranger's function does
            unwritten = isinstance(error, NotImplementedError) and "aten" not in str(error)  # torch raises it with aten
            fault = UnwrittenFault if unwritten else Fault
            raise fault(Kind("it raises an error", "the line that is named"), their_error(error)) from error
        finally:
            torch.set_default_dtype(torch.float32)
        self._refuse_changed(given, copies, flags)
        if answer is None:
            raise UnwrittenFault(Kind("it returns nothing (None)", "the return line"), "None")
        return answer

    def _refuse_changed(self, given: dict[str, Any], copies: dict[str, Any], flags: dict[str, bool]) -> None:
        for name, value in given.items():
            where = f"operations on {name} that end in an underscore or assign into it"
            if isinstance(value, Tensor):
                if value.shape != copies[name].shape or not torch.equal(
                    value.detach().nan_to_num(), copies[name].nan_to_num()
                ):
                    raise Fault(
                        Kind(f"it changes its input {name} in place", where),
                        short_text(value)[:200],
                        short_text(copies[name])[:200],
                    )
                if value.requires_grad and not flags[name]:
                    kind = Kind(
                        f"it turns on a gradient through its input {name}, which has to stay a constant",
                        f"what is done to {name} before it is used",
                    )
                    raise Fault(kind, "requires_grad=True afterwards", "requires_grad=False")
            elif isinstance(value, list) and value != copies[name]:
                raise Fault(Kind(f"it changes its input {name} in place", where), str(value), str(copies[name]))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def fresh(inputs: dict[str, Any], *leaves: str) -> dict[str, Any]:
    """Copy the inputs, those named in `leaves` as tensors that collect a gradient."""
    copies = {name: _copy(value) for name, value in inputs.items()}
    for name in leaves:
        copies[name] = copies[name].requires_grad_()
    return copies


def answer_parts(answer: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the items of a returned tuple; `Fault` if it has not one for each name."""
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return tuple(answer)
    got = f"a tuple of {len(answer)}" if isinstance(answer, tuple | list) else _type(answer)
    kind = Kind("it returns something else than the handout asks for", "the return line")
    raise Fault(kind, got, f"({', '.join(names)})")


def tensor(value: Any, what: str, scalar: bool = False) -> Tensor:
    """Return the value as a detached tensor; `Fault` if it is none. A scalar may be a number, or of shape (1,)."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if scalar and value.numel() == 1 else value.detach()
    if scalar and isinstance(value, int | float):
        return torch.tensor(float(value))
    kind = Kind(f"it returns no tensor as {what}", "the return line")
    raise Fault(kind, _type(value), "a tensor")


def _type(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


class NotLoadedError(Exception):
    """Why a module cannot be loaded, as the end of a sentence that begins with its name."""


def load_module(path_or_name: str) -> ModuleType:
    """Load `package.module`, or the module of a file `path/to/module.py`; `NotLoadedError` if that fails."""
    path = Path(path_or_name)
    if path_or_name.endswith(".py") or path.is_file():
        return _load_file(path)
    if path.is_dir():
        inner = next((p.name for p in sorted(path.glob("*.py"))), "module.py")
        raise NotLoadedError(f"is a folder: give a file of it, such as {path / inner}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path_or_name.replace("/", "."))
    except ModuleNotFoundError as error:
        if error.name is not None and f"{path_or_name}.".startswith(f"{error.name}."):
            raise NotLoadedError(
                f"there is no module {error.name} in {here} or among the installed packages: fix the name, or give "
                "the path of a .py file"
            ) from None
        raise NotLoadedError(f"importing it fails: {their_error(error)}: fix or install that") from None
    except BaseException as error:  # also what ends a process, such as SystemExit
        if isinstance(error, TimeUpError):
            raise
        raise NotLoadedError(f"importing it fails: {their_error(error)}: fix that") from None


def _load_file(path: Path) -> ModuleType:
    """Load the module of a file; its folder and the folder of its package can be imported from."""
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
