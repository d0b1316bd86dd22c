"""The fields of a dataclass from a JSON file that anybody may have written: of their types, or refused."""

from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 1e100  # a figure beyond this is none


def fields_of(kind: type, told: dict[str, Any]) -> dict[str, Any]:
    """Those of `told` that the dataclass has. `TypeError` for a value of another type than its field's."""
    kinds = get_type_hints(kind)
    found = {field.name: told[field.name] for field in fields(kind) if field.name in told}
    for name, value in found.items():
        if not fits(value, kinds[name]):
            raise TypeError(f"{name} has a value of another type")
    return found


def number(value: Any) -> float | None:
    """The value as a figure; None where it is none, or no finite one."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type: any, a plain one, or a list, dict, tuple or union of such.

    >>> fits({"lr": "1e-3"}, dict[str, str]), fits([1, None], list[int]), fits(1, float | None), fits(True, int)
    (True, False, True, False)
    """
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is UnionType:
        return any(fits(value, one) for one in of)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, of[0]) and fits(v, of[1]) for k, v in value.items())
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(one, of[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return number(value) is not None
    return isinstance(value, kind)
