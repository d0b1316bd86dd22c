"""Bugs as text: a right implementation with one place changed, as a module."""

from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


def planted_text(right: str, old: str, new: str) -> str:
    """The text of `right` (a file of this folder) with `new` in the place of `old`, which must stand there."""
    text = (HERE / right).read_text("utf-8")
    assert old in text, f"{right} has nothing like {old!r}"
    changed = text.replace(old, new)
    assert changed != text
    return changed


def module_of(text: str, name: str = "planted") -> ModuleType:
    """The text as a module."""
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module
