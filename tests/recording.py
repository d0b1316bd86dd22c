"""A config that notes which of its settings are asked for."""

import sys
from dataclasses import fields, is_dataclass
from typing import Any

CHECKING = ("rlreason.objectives.published", "rlreason.config.leaves")


class Recording:
    """The settings that were asked for by name, of a run whose config is watched from now on."""

    def __init__(self, run: Any) -> None:
        self.read: set[str] = set()
        self._watch(run, "")

    def _watch(self, node: Any, prefix: str) -> None:
        names = [field.name for field in fields(node)]
        for name in names:
            if is_dataclass(child := getattr(node, name)):
                self._watch(child, f"{prefix}{name}.")
            for key, part in child.items() if isinstance(child, dict) else ():
                if is_dataclass(part):
                    self._watch(part, f"{prefix}{name}.{key}.")
        node.__class__ = self._watched(type(node), prefix, frozenset(names))

    def _watched(self, kind: type, prefix: str, names: frozenset[str]) -> type:
        def ask(node: Any, name: str) -> Any:
            value = kind.__getattribute__(node, name)
            frame = sys._getframe(1)  # to check the rules of a setting is not to use it
            checks = frame.f_globals["__name__"] in CHECKING or frame.f_code.co_name in ("rules", "replace")
            if name in names and not checks:
                self.read.add(prefix + name)
            return value

        return type(kind.__name__, (kind,), {"__getattribute__": ask})
