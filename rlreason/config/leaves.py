"""A run's settings one by one, as on the command line; the files, templates and packages that they name."""

import dataclasses
import glob
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError

#: A condition, and the group that it calls `here`.
Condition = tuple[str, Any]


class Leaf(NamedTuple):
    """One setting of a run."""

    key: str  # dotted
    value: Any
    default: Any  # of its dataclass; `dataclasses.MISSING`: none
    metadata: Mapping[str, Any]  # what its field says
    conditions: tuple[Condition, ...]  # under which it is read, those of the groups around it first


def leaves(settings: Any, prefix: str = "", around: tuple[Condition, ...] = ()) -> Iterator[Leaf]:
    """Yield every setting of a dataclass, those of nested groups too.

    >>> from rlreason.config.groups import SamplingConfig
    >>> [leaf[:3] for leaf in leaves(SamplingConfig(min_tokens=4), "sampling.")][1]
    ('sampling.min_tokens', 4, '???')
    """
    kind: Any = type(settings)
    for one in fields(settings):
        value, key = getattr(settings, one.name), f"{prefix}{one.name}"
        metadata = metadata_of(kind, one.name)
        conditions = around + tuple((part, settings) for part in conditions_of(metadata))
        if is_dataclass(value):
            yield from leaves(value, f"{key}.", conditions)
        elif one.default_factory is not dataclasses.MISSING:
            yield Leaf(key, value, one.default_factory(), metadata, conditions)
        else:
            yield Leaf(key, value, one.default, metadata, conditions)


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


def below(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings whose names begin with `prefix`, by the rest of their names.

    >>> below({"budget.hours": 1.0, "seed": 0}, "budget.")
    {'hours': 1.0}
    """
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def refuse_own_input(run: Any, folder: Path, left: Collection[str]) -> None:
    """Refuse a run whose input is a file that an earlier run `left` in its folder, which will be set aside."""
    home = folder.resolve()
    for leaf in leaves(run):
        if "source" not in leaf.metadata or not isinstance(leaf.value, str):
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
    """Format a value as on the command line.

    >>> typed_word(False), typed_word(None), typed_word([1, 2]), typed_word(1e-06)
    ('false', 'null', '[1,2]', '1e-06')
    """
    if isinstance(value, list):
        return f"[{','.join(map(typed_word, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


SUFFIXES = ("", ".jsonl", ".json")  # for splits named without one
SPLITS = ("train", "validation", "valid", "val", "dev", "test")  # usual files of problems
#: Suffixes of files that hold problems in another format, or packed.
UNREAD = (".parquet", ".csv", ".feather", ".arrow", ".xlsx", ".pkl", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")


def locate(path: str | None, split: str) -> Path | None:
    """Return a split's file: `split` in the folder `path`, with or without its suffix, or `split` itself as a path."""
    folder = Path(path).expanduser() if path else None
    if folder is not None and folder.is_dir():
        for suffix in SUFFIXES:
            file = folder / f"{split}{suffix}"
            if file.is_file() and file.suffix.lower() not in UNREAD:
                return file
    direct = Path(split).expanduser()
    return direct if direct.suffix in SUFFIXES[1:] and direct.is_file() else None


def unread_format(path: str | None, split: str) -> str:
    """Name a split's file in an unsupported format, and how to convert it; "" if there is none.

    `path` may itself be such a file, and so may `split`, or a file of the split's name in the folder `path`.
    """
    folder = Path(path).expanduser() if path else Path()
    beside = sorted(folder.glob(f"{glob.escape(split)}.*")) if path and Path(split).name == split else []
    files = [file for file in (Path(split).expanduser(), folder / split, folder, *beside) if file.is_file()]
    return next((describe_format(file) for file in files if file.suffix not in SUFFIXES[1:]), "")


def describe_format(file: Path) -> str:
    """Describe a file's unsupported format, by its name, and how to convert it."""
    frame = "frame.to_json('rows.jsonl', orient='records', lines=True)"
    called = f"a {file.suffix.lower()[1:]} file" if file.suffix else "a file without a suffix"
    return f"{file} is {called}, and .jsonl and .json are read: unpack it, or convert it (in pandas: {frame})"


def may_be_hub_name(path: str) -> bool:
    """Whether a path may be a hub name: one slash, no leading dot, and no local file."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def resource_dir(name: str) -> Path:
    """Return `conf`, `prompts` or `multirun_sweeps`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


#: Import name -> (its display name, the cure if it is missing).
PACKAGES = {
    "peft": ("the peft library", "pip install 'rlreason[lora]', or set it to 0"),
    "bitsandbytes": ("the bitsandbytes library", "pip install 'rlreason[8bit]', or set optimizer=adamw"),
    "datasets": (
        "the datasets package",
        "pip install 'rlreason[hub]', or give a folder with train.jsonl and test.jsonl",
    ),
    "reasoning_gym": ("the reasoning-gym package", "pip install 'rlreason[gym]'"),
    "wandb": ("the wandb package", "pip install wandb, or choose logger=none"),
    "tensorboard": ("the tensorboard package", "pip install 'rlreason[tensorboard]', or choose logger=none"),
    "trackio": ("the trackio package", "pip install 'rlreason[trackio]', or choose logger=none"),
}


def needs(setting: str, package: str, reason: object = None) -> str:
    """Return the complaint if `setting` needs a package that is missing or, for a `reason`, broken.

    >>> needs("logger=wandb", "wandb")
    'logger=wandb needs the wandb package: pip install wandb, or choose logger=none'
    """
    called, cure = PACKAGES[package]
    return f"{setting} needs {called}{f' ({reason})' if reason else ''}: {cure}"


@contextmanager
def required(setting: str, package: str) -> Iterator[None]:
    """Import a package in this block: `ConfigError` in one line if that fails."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(needs(setting, package, error)) from error


def load_template(file: str, folder: Path) -> str:
    """Load a template by file name in `folder`, or by path; `ConfigError` unless `{question}` is its only field."""
    path = next((p for p in (folder / file, Path(file).expanduser()) if p.is_file()), None)
    if path is None:
        offered = ", ".join(sorted(p.name for p in folder.glob("*.prompt")))
        raise ConfigError(
            f"prompt.file={file} is neither in {folder} ({offered}) nor a path: give one of these, or a path"
        )
    template = path.read_text(encoding="utf-8-sig")  # an editor may begin a file with a byte-order mark
    try:
        filled = render(template, "\0")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"prompt.file={file}: a brace in it is no field ({error}): double literal braces, as in \\boxed{{{{}}}}"
        ) from error
    if "\0" not in filled:
        raise ConfigError(f"prompt.file={file} never uses the question: put {{question}} where it belongs")
    return template


def render(template: str, question: str) -> str:
    r"""Return the prompt for one question.

    >>> render("Q: {question} Use \\boxed{{}}.", "1+1? {}")
    'Q: 1+1? {} Use \\boxed{}.'
    """
    return template.format(question=question)


Render = Callable[[str], str]  # a question -> text


def template_of(file: str) -> str:
    """Load the text that a question is filled into: a whole prompt, or the user's turn of a chat."""
    try:
        return load_template(file, resource_dir("prompts"))
    except (OSError, ValueError) as error:  # no permission, no UTF-8
        raise ConfigError(f"prompt.file={file} cannot be read ({error}): give a text file in UTF-8") from error


def prompt_renderer(file: str) -> Render:
    """Return the function that fills a question into the template."""
    return partial(render, template_of(file))
