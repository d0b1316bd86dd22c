"""Walk over a run's settings one by one, as they are typed on the command line: `seed`, `sampling.max_tokens` ..."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError


class Leaf(NamedTuple):
    """One setting: its dotted key, its value, and what its dataclass says of it."""

    key: str
    value: Any
    default: Any  # `dataclasses.MISSING`: none
    metadata: Mapping[str, Any]  # such as the words to choose from (`choices.py`)


def leaves(settings: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every setting below a dataclass, those of the groups inside it too.

    >>> from rlreason.config.groups import SamplingConfig
    >>> [leaf[:3] for leaf in leaves(SamplingConfig(min_tokens=4), "sampling.")][1]
    ('sampling.min_tokens', 4, '???')
    """
    for one in fields(settings):
        value, key = getattr(settings, one.name), f"{prefix}{one.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        elif one.default_factory is not dataclasses.MISSING:
            yield Leaf(key, value, one.default_factory(), one.metadata)
        else:
            yield Leaf(key, value, one.default, one.metadata)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flat({"seed": 0, "data": {"limit": 8, "fields": {"id": None}}})
    {'seed': 0, 'data.limit': 8, 'data.fields.id': None}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def below(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin so, by the rest of their names.

    >>> below({"budget.hours": 1.0, "seed": 0}, "budget.")
    {'hours': 1.0}
    """
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


#: Settings that name what a run reads, those below `eval` too.
INPUTS = (
    "model.path", "data.path", "data.train", "data.validation", "data.pass_rates", "data.ground_truth", "prompt.file",
    "start", "problem", "prompts.first", "prompts.error", "prompts.extend", "prompts.no_code",
)  # fmt: skip


def refuse_own_input(run: Any, folder: Path, left: Collection[str]) -> None:
    """What a run reads must not be among what an earlier one `left` in the folder, by name: that is set aside."""
    home = folder.resolve()
    for leaf in leaves(run):
        if leaf.key.removeprefix("eval.") not in INPUTS or not isinstance(leaf.value, str):
            continue
        path = Path(leaf.value).expanduser().resolve()
        if not path.exists() or not path.is_relative_to(home):
            continue
        if path == home or path.relative_to(home).parts[0] in left:
            raise ConfigError(
                f"{leaf.key}={leaf.value} lies in hydra.run.dir={folder}, whose files would be set aside before it is "
                "read: choose another hydra.run.dir"
            )


def typed_word(value: Any) -> str:
    """A value as it is typed on the command line.

    >>> typed_word(False), typed_word(None), typed_word([1, 2]), typed_word(1e-06)
    ('false', 'null', '[1,2]', '1e-06')
    """
    if isinstance(value, list):
        return f"[{','.join(map(typed_word, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
