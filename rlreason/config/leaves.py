"""A run's settings one by one, as on the command line; the files, templates and packages that they name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError

FORMATS = (".jsonl", ".json")  # files of problems
SPLITS = ("train", "validation", "valid", "val", "dev", "test")  # their usual names, without a suffix too
#: Import name -> the cure where it is missing.
PACKAGES = {
    "peft": "pip install 'rlreason[lora]', or set it to 0",
    "bitsandbytes": "pip install 'rlreason[8bit]', or set optimizer=adamw",
    "datasets": "pip install 'rlreason[hub]', or give a folder with train.jsonl and test.jsonl",
    "reasoning_gym": "pip install 'rlreason[gym]'",
    "wandb": "pip install wandb, or choose logger=none",
    "tensorboard": "pip install 'rlreason[tensorboard]', or choose logger=none",
    "trackio": "pip install 'rlreason[trackio]', or choose logger=none",
}


class Leaf(NamedTuple):
    """One setting of a run."""

    key: str  # dotted
    value: Any
    default: Any  # of its dataclass; `dataclasses.MISSING`: none
    metadata: Mapping[str, Any]  # what its field says
    conditions: tuple[tuple[str, Any], ...]  # under which it is read, each with the group that it calls `here`


def leaves(settings: Any, prefix: str = "", around: tuple[tuple[str, Any], ...] = ()) -> Iterator[Leaf]:
    """Yield every setting of a dataclass, those of nested groups too.

    >>> from rlreason.config.groups import SamplingConfig
    >>> [leaf[:3] for leaf in leaves(SamplingConfig(min_tokens=4), "sampling.")][1]
    ('sampling.min_tokens', 4, '???')
    """
    kind: Any = type(settings)
    for one in fields(settings):
        value, key, metadata = getattr(settings, one.name), f"{prefix}{one.name}", metadata_of(kind, one.name)
        conditions = around + tuple((part, settings) for part in conditions_of(metadata))
        groups = {f"{key}.": value} if is_dataclass(value) else {}
        if isinstance(value, dict):  # of groups by name, or of plain values
            groups = {f"{key}.{name}.": part for name, part in value.items() if is_dataclass(part)}
        if groups:
            for place, part in groups.items():
                yield from leaves(part, place, conditions)
        else:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            yield Leaf(key, value, default, metadata, conditions)


@cache
def metadata_of(kind: type, name: str) -> dict[str, Any]:
    """Return what a field says, with what it says in base classes: a class may give it another default alone.

    >>> from rlreason.config.data import CountdownConfig
    >>> metadata_of(CountdownConfig, "verifier")["only_if"]
    'verifies(here)'
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        field = getattr(base, "__dataclass_fields__", {}).get(name)
        found |= field.metadata if field else {}
    return found


def conditions_of(metadata: Mapping[str, Any]) -> list[str]:
    """Return the conditions of a field, all of which must hold."""
    return metadata["only_if"].split(" and ") if metadata.get("only_if") else []


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to their dotted names.

    >>> flat({"seed": 0, "data": {"limit": 8, "fields": {"id": None}}})
    {'seed': 0, 'data.limit': 8, 'data.fields.id': None}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def typed_word(value: Any) -> str:
    """Format a value as on the command line.

    >>> typed_word(False), typed_word(None), typed_word([1, 2]), typed_word(1e-06)
    ('false', 'null', '[1,2]', '1e-06')
    """
    if isinstance(value, list):
        return f"[{','.join(map(typed_word, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def locate(path: str | None, split: str) -> Path | None:
    """Return a split's file: `split` in the folder `path`, with or without its suffix, or `split` itself as a path."""
    places = [Path(path, f"{split}{suffix}") for suffix in ("", *FORMATS)] if path else []
    if Path(split).suffix in FORMATS:
        places.append(Path(split))
    files = [place.expanduser() for place in places if place.suffix in ("", *FORMATS)]
    return next((file for file in files if file.is_file()), None)


def may_be_hub_name(path: str) -> bool:
    """Whether a path may be a hub name: one slash, no leading dot, and no local file."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def resource_dir(name: str) -> Path:
    """Return `conf`, `prompts` or `multirun_sweeps`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def needs(setting: str, package: str) -> str:
    """Return the complaint if `setting` needs a package that is missing.

    >>> needs("logger=wandb", "wandb")
    'logger=wandb needs the wandb package: pip install wandb, or choose logger=none'
    """
    return f"{setting} needs the {package.replace('_', '-')} package: {PACKAGES[package]}"


def template_of(file: str) -> str:
    """Load the text that a question is filled into, from prompts/ or by path: a whole prompt, or a chat's user turn."""
    folder = resource_dir("prompts")
    path = next((p for p in (folder / file, Path(file).expanduser()) if p.is_file()), None)
    said = f"prompt.file={file}"
    if path is None:
        offered = ", ".join(sorted(p.name for p in folder.glob("*.prompt")))
        raise ConfigError(f"{said} is neither in {folder} ({offered}) nor a path: give one of these, or a path")
    try:
        template = path.read_text(encoding="utf-8-sig")  # an editor may begin a file with a byte-order mark
        filled = template.format(question="\0")
    except (OSError, KeyError, IndexError, ValueError) as error:
        cure = "give a text in UTF-8, and double literal braces, as in \\boxed{{}}"
        raise ConfigError(f"{said} cannot be used ({error!r}): {cure}") from error
    if "\0" not in filled:
        raise ConfigError(f"{said} never uses the question: put {{question}} where it belongs")
    return template


def prompt_renderer(file: str) -> Callable[[str], str]:
    """Return the function that fills a question into the template."""
    template = template_of(file)
    return lambda question: template.format(question=question)
