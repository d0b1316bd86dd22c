"""A problem of discovery: a folder with a prompt, a starter program and a verifier, described by its `problem.yaml`."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.sources import resource_dir
from rlreason.errors import ConfigError

HOME = Path(__file__).with_name("problems")
FILE = "problem.yaml"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. `prompt` is a template; `options` go to the verifier; `record` lists what others reached."""

    folder: Path
    name: str
    title: str
    unit: str  # what is counted: points
    prompt: str  # a file in the folder or in prompts/
    starter: str  # a program in the folder
    verifier: str  # a module in the folder with `verify(rows, **options)`
    options: Mapping[str, Any] = field(default_factory=dict)
    most_rows: int = 10_000
    most_digits: int = 1000  # of one integer
    record: tuple[Mapping[str, Any], ...] = ()  # {"score", "who", "note"}
    hints: str = ""  # for the prompt, where they are asked for

    @property
    def starter_source(self) -> bytes:
        """The starter program."""
        return (self.folder / self.starter).read_bytes()

    @property
    def hash(self) -> str:
        """Of what scores depend on: the verifier and its options, and how much is taken from a program."""
        more = repr((sorted(self.options.items()), self.most_rows, self.most_digits)).encode()
        return hashlib.sha256((self.folder / self.verifier).read_bytes() + more).hexdigest()[:16]

    def prompt_file(self) -> Path:
        """Where its prompt stands."""
        own = self.folder / self.prompt
        return own if own.is_file() else resource_dir("prompts") / self.prompt


def shipped() -> list[str]:
    """The names of the problems that come with the package."""
    return sorted(path.parent.name for path in HOME.glob(f"*/{FILE}"))


def problem_named(name: str, key: str = "problem") -> Problem:
    """A problem by its name, or by the path of its folder; `ConfigError` where it is none. `key`: the setting."""
    folder = HOME / name if re.fullmatch(r"\w+", name) and (HOME / name / FILE).is_file() else Path(name)
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"{key}={name} is no problem: choose one of {', '.join(shipped())}, or give a folder that holds {FILE}"
        )
    return read_problem(folder.absolute())


def read_problem(folder: Path) -> Problem:
    """The problem in a folder; `ConfigError` where its file is not sound."""
    path = folder / FILE
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read ({str(error).splitlines()[0]}): write it as in {HOME}") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path} holds no settings: write it as {HOME / 'kissing_11' / FILE}")
    known = {
        "title": str, "unit": str, "prompt": str, "starter": str, "verifier": str, "options": dict, "most_rows": int,
        "most_digits": int, "record": list, "hints": str,
    }  # fmt: skip
    for name, value in told.items():
        if name not in known or not isinstance(value, known[name]):
            rule = f"must be of type {known[name].__name__}" if name in known else f"is none of {', '.join(known)}"
            raise ConfigError(f"{path}: {name}: {value!r:.80} {rule}: correct it")
    missing = [name for name in ("title", "prompt") if name not in told]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: add it")
    own: dict[str, Any] = {"unit": "points", "starter": "starter.py", "verifier": "verify.py"} | told
    own["record"] = tuple(row for row in told.get("record", []) if isinstance(row, dict))
    problem = Problem(folder, folder.name, **own)
    for file in (folder / problem.starter, folder / problem.verifier, problem.prompt_file()):
        if not file.is_file():
            raise ConfigError(f"{path} names {file.name}, and {file} is no file: add it, or correct the name")
    return problem
