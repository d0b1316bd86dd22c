"""Write docs/settings.md, every setting and option as the code has them: `python tools/settings_page.py`.

Types, defaults, ranges, choices, conditions and what a setting is for are what its field says (`rlreason/settings.py`);
what an option is for is the comment at the top of its file. An argument names another file to write.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlreason.cli.flags import Request
from rlreason.cli.names import NAMES
from rlreason.config.leaves import conditions_of, flat, metadata_of, resource_dir, typed_word
from rlreason.config.rules import words_of
from rlreason.config.store import SCHEMAS, register
from rlreason.objectives.published import OPTIONS
from rlreason.settings import Range

#: The algorithms' settings, the default one first.
ALGORITHMS: Mapping[str, type] = {"grpo": SCHEMAS["schema"]["grpo"], **SCHEMAS["schema"]}
NAMING = ("name", "kind", "loss_type", "engine")  # settings that name the chosen option of their group
OF_NO_GROUP = "settings"  # where they stand in ORDER
ORDER = (
    "algorithm", "scale", "experiment", "sweep", OF_NO_GROUP, "objective", "loss", "length_norm", "baseline",
    "std_norm", "off_policy", "sampling", "prompt", "data", "model", "rollout", "eval", "grading", "monitors", "budget",
    "logger",
)  # fmt: skip
#: What groups are for that have options and no settings of their own.
ABOUT = {
    "algorithm": "How the policy is trained, or that it is only measured.",
    "scale": "Sizes and numbers that fit together, for each algorithm.",
    "experiment": "A course's model, data, prompt and numbers at once.",
    "sweep": "Grids of runs, started by `-m sweep=NAME`; what is swept can be overridden like any setting.",
    "objective": "A published objective: it chooses the axes below, each of which can still be overridden.",
    "baseline": "What is subtracted from the reward of a response.",
    "std_norm": "What that difference is divided by.",
    "off_policy": "How often one rollout batch is used.",
}
HEAD = """\
# Settings

Every setting, as the code has it: `make docs` writes this page, and a test holds it to the code.

- On the command line `KEY=VALUE` sets one, and `GROUP=OPTION` chooses a file of `conf/GROUP/` that sets several.
- The default is that of the plain command, `python -m rlreason`; where an algorithm has another one, that of \
`algorithm=NAME` alone stands behind it; *by* names the groups of which some option sets another value.
- A setting that is read under a condition only is refused where it is given and the condition does not hold.
- `hydra.run.dir=DIR` is the run's folder, `hydra.sweep.dir=DIR` that of a sweep.
"""


class Setting(NamedTuple):
    """A field of a settings class, with all that it says."""

    key: str  # dotted
    field: Field[Any]
    metadata: Mapping[str, Any]
    conditions: list[str]  # where it is read


class Option(NamedTuple):
    """One option of a group."""

    name: str
    about: str
    sets: dict[str, dict[str, Any]]  # {key: value} under "", and by algorithm where it says more for some
    schema: str  # that its settings are of; empty where the group has one for all options


@cache
def options() -> dict[str, list[Option]]:
    """Return every group that a user chooses from, with the options that come with the package."""
    groups = [path for path in sorted(resource_dir("conf").iterdir()) if path.is_dir()]
    folders = {folder.name: folder for folder in groups}
    folders["sweep"] = resource_dir("multirun_sweeps")
    return {group: [_read(file, group) for file in sorted(path.glob("*.yaml"))] for group, path in folders.items()}


def _read(file: Path, group: str) -> Option:
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("# @package")]
    comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    own = {name: own for name in SCHEMAS["schema"] if (own := file.parent / name / file.name).is_file()}
    sets = {name: _sets(path, group) for name, path in {"": file, **own}.items()}
    schema = sets[""].pop("schema", "")
    return Option(file.stem, comment, sets, schema)


def _sets(file: Path, group: str) -> dict[str, Any]:
    """Return what a file sets, including other options that it chooses, as typed; and its schema, as `schema`."""
    whole = group == "sweep" or file.read_text("utf-8").startswith("# @package _global_")
    content: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for item in content.pop("defaults", ()):
        for place, option in item.items() if isinstance(item, dict) else []:
            if place.startswith("override "):
                group_of, _, package = place.removeprefix("override /").partition("@")
                found[package.removeprefix("_global_.") or group_of] = option
        if not whole and str(item).startswith("/schema/"):
            found["schema"] = item.partition("@")[0].rpartition("/")[2]
    grid = content.pop("hydra", {}).get("sweeper", {}).get("params", {})
    found |= flat(content, "" if whole else f"{group}.") | grid
    named = (group, *(f"{group}.{word}" for word in NAMING))  # by which the chosen option is known again
    return {key: value for key, value in found.items() if key not in named or value != file.stem}


@cache
def plain(algorithm: str) -> dict[str, Any]:
    """Return every setting of the command `algorithm=NAME`."""
    register()
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        words = [f"algorithm={algorithm}"]
        composed: Any = OmegaConf.to_container(compose(Request({}, words).config_name, words), resolve=True)
        return flat(composed)


def spelled(kind: Any, key: str) -> str:
    """Return the type of a field in words.

    >>> spelled(list[str] | None, "x"), spelled(float, "x")
    ('list of str or null', 'float')
    """
    if get_origin(kind) is list:
        return f"list of {spelled(get_args(kind)[0], key)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(spelled(one, key) for one in get_args(kind))
    if is_dataclass(kind):
        return "option of [{0}](#{0})".format(key.rpartition(".")[2])
    return {Any: "str or list of str", NoneType: "null"}.get(kind) or str(kind.__name__)


def default(field: Field[Any], key: str, algorithms: Iterable[str], schema: str = "") -> str:
    """Return the default of a setting, under `algorithms` where the plain command has it, and which groups change it.

    For a setting that only one `schema` of its group has, only the options of this schema count.
    """
    own = field.default if field.default_factory is MISSING else field.default_factory()
    values = {name: plain(name)[key] for name in algorithms if key in plain(name)} or {"": own}
    first = next(iter(values.values()))
    others = [f", {name}: {_value(value)}" for name, value in values.items() if value not in (first, name)]
    by = [
        f"[{group}](#{group})"
        for group, offered in options().items()
        if group not in ("algorithm", "sweep", "experiment")
        and any(
            key in sets and sets[key] != first
            for option in offered
            if schema in ("", option.schema) or not option.schema
            for sets in option.sets.values()
        )
    ]
    return _value(first) + "".join(others) + (f"; by {', '.join(by)}" if by else "")


def rule(setting: Setting) -> str:
    """Return the choices of a setting, or its range."""
    bounds: Range | None = setting.metadata.get("range")
    if bounds is None:
        key = {"loss.loss_type": "loss_type", "length_norm.kind": "length_norm"}.get(setting.key, setting.key)
        words = (
            setting.metadata.get("choices") or OPTIONS.get(key) or [option.name for option in options().get(key, ())]
        )
        return ", ".join(f"`{word}`" for word in words)
    low, high = f"{'above ' * bounds.above}{_number(bounds.low)}", f"{'below ' * bounds.below}{_number(bounds.high)}"
    # The reader's machine has another number of processors.
    return f"{low} to {'64, or to the number of processors' if 'processors' in bounds.cure else high}"


def about(setting: Setting, shared: Sequence[str]) -> str:
    """Return what a setting is for, its other names, and when it is read besides the `shared` conditions."""
    doc = setting.metadata.get("doc", "")
    said = _text(re.sub(r"^[a-z]+(?=[ ,])", lambda word: word[0].capitalize(), doc.removesuffix(".")))
    if also := [f"`{name}`" for name, ours in NAMES.items() if ours == setting.key]:
        said += f" (also {', '.join(also)})"
    only = [where for where in setting.conditions if where not in shared]
    return said + (f". *Read {_text('; '.join(only))}.*" if only else "")


def _value(value: Any) -> str:
    return "required" if value == "???" else _code(typed_word(value))


def _code(text: str) -> str:
    text = text.replace("\n", "\\n").replace("|", "\\|")
    return f"` {text} `" if text != text.strip() else f"`{text}`"


def _text(text: str) -> str:
    """Return a comment as the text of a Markdown table."""
    return re.sub(r"([<>|])", r"\\\1", text)


def _number(number: float) -> str:
    return f"{number:g}" if number < 1e6 else f"{number:.3g}".replace("e+0", "e").replace("e+", "e")


def settings_of(kind: type, group: str, around: Sequence[str] = ()) -> Iterator[Setting]:
    """Return every setting below a dataclass; `around`: the conditions of the group itself."""
    for field in fields(kind):
        metadata = metadata_of(kind, field.name)
        where = [*around, *(words_of(condition, group) for condition in conditions_of(metadata))]
        key = f"{group}.{field.name}".removeprefix(".")
        if is_dataclass(field.default_factory):
            yield from settings_of(field.default_factory, key, where)
        else:
            yield Setting(key, field, metadata, list(dict.fromkeys(where)))


def table(rows: Sequence[Setting], algorithms: Iterable[str], schema: str = "") -> list[str]:
    """Return Markdown lines: the conditions under which all settings are read, then a line for each setting."""
    shared = [where for where in rows[0].conditions if len(rows) > 1 and all(where in row.conditions for row in rows)]
    lines = [f"All are read {where}.\n" for where in shared]
    lines += ["| setting | type | default | rule | what it is for |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        takes = row.metadata.get("takes") or spelled(row.field.type, row.key)
        cells = [f"`{row.key}`", takes, default(row.field, row.key, algorithms, schema), rule(row), about(row, shared)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def option_table(group: str, offered: Iterable[Option]) -> list[str]:
    """Return Markdown lines: one for every option of a group, with what it sets."""
    lines = [f"| `{group}=` | what it is | sets |", "| --- | --- | --- |"]
    for option in offered:
        sets = [
            f"{name}: " * bool(name) + " ".join(_code(f"{key}={typed_word(value)}") for key, value in words.items())
            for name, words in option.sets.items()
        ]
        lines.append(f"| `{option.name}` | {_text(option.about)} | {'<br>'.join(filter(None, sets))} |")
    return [*lines, ""]


def group_section(group: str) -> list[str]:
    """Return Markdown lines: what a group is for, its options and its settings."""
    holders = {name: field for name, schema in ALGORITHMS.items() for field in fields(schema) if field.name == group}
    kind: Any = next((f.default_factory for f in holders.values() if is_dataclass(f.default_factory)), None)
    apart: dict[str, Any] = {n: f.default_factory for n, f in holders.items() if kind and f.default_factory is not kind}
    holders = {name: field for name, field in holders.items() if name not in apart}
    lines = [f"{_first_line(kind)} Of {_named(holders)}." if kind else ABOUT[group], ""]
    offered = options().get(group, [])
    lines += option_table(group, offered) if offered else []
    if not kind:
        return lines
    around = [words_of(part, group) for field in holders.values() for part in conditions_of(field.metadata)]
    around = list(dict.fromkeys(around))
    rows = list(settings_of(kind, group, around))
    lines += table(rows, holders)
    for name, other in apart.items():
        lines += [f"Of {name}: {_first_line(other)}", "", *table(list(settings_of(other, group)), [name])]
    for name, schema in SCHEMAS.get(f"schema/{group}", {}).items():
        named = [option.name for option in offered if option.schema == name]
        chosen = ", ".join(f"`{group}={option}`" for option in named)  # none: a schema that no file of the group is of
        lines += [f"{chosen}: {_first_line(schema)}" if named else _first_line(schema), ""]
        own = [row for row in settings_of(schema, group, around) if row.key not in [common.key for common in rows]]
        lines += table(own, holders if plain("grpo")[f"{group}.name"] in named else (), name)
    return lines


def _first_line(kind: type) -> str:
    return _text((kind.__doc__ or "").partition("\n")[0])


def _named(algorithms: Iterable[str]) -> str:
    names = list(algorithms)
    without = [name for name in ALGORITHMS if name not in names]
    return " but ".join(["every algorithm", *without]) if len(without) < 2 else ", ".join(names)


def of_no_group() -> dict[tuple[str, ...], list[Setting]]:
    """Return the settings outside groups, by algorithm; one that two of them define separately appears twice."""
    holders: dict[tuple[type, str], list[str]] = {}
    for name, schema in ALGORITHMS.items():
        for field in fields(schema):
            if not is_dataclass(field.default_factory):
                bases = reversed(schema.__mro__)
                first = next(base for base in bases if field.name in getattr(base, "__annotations__", ()))
                holders.setdefault((first, field.name), []).append(name)
    found: dict[tuple[str, ...], list[Setting]] = {}
    for (first, key), names in holders.items():
        found.setdefault(tuple(names), []).extend(row for row in settings_of(first, "") if row.key == key)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def page() -> str:
    """Return the whole page."""
    sections: dict[str, list[str]] = {}
    held = [
        field.name for schema in ALGORITHMS.values() for field in fields(schema) if is_dataclass(field.default_factory)
    ]
    for group in dict.fromkeys((*ORDER, *options(), *held)):
        if group == OF_NO_GROUP:
            sections |= {f"Settings of {_named(names)}": table(rows, names) for names, rows in of_no_group().items()}
        else:
            sections[group] = group_section(group)
    links = [f"[{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})" for title in sections]
    body = [line for title, lines in sections.items() for line in (f"## {title}", "", *lines)]
    return "\n".join([HEAD, " · ".join(links), "", *body]).rstrip() + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1]) if sys.argv[1:] else resource_dir("docs") / "settings.md"
    file.write_text(page(), "utf-8")
