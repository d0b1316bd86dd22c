"""List completions of a subcommand's arguments: flags, runs and files. The part of completion that needs no Hydra."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlreason.cli.subcommands import Subcommand, parser_of
from rlreason.records.files import CONFIG, SET_ASIDE

RUNS, DEEP = Path("runs"), 4  # the default folder of runs, and the depth to which it is searched
FILES = ("config_dir", "config_path", "experimental_rerun")  # Hydra's flags that name a file or a folder


def of_subcommand(subcommand: Subcommand, before: Sequence[str], word: str) -> list[str]:
    """Return completions: flags, their values, and the subcommand's positional arguments."""
    parser = parser_of(subcommand)
    given = [
        one for at, one in enumerate(before) if not one.startswith("-") and not awaiting_value(parser, before[:at])
    ]
    places = [action for action in parser._actions if not action.option_strings]
    many = places[-1].nargs == "+"
    left = places[len(given) :] or (places[-1:] if many else [])
    flagged = of_flags(parser, before, word if left else word or "-")  # only flags may follow
    if word.startswith("-") or awaiting_value(parser, before) or not left:
        return flagged
    if left[0].metavar == "RUN":
        return flagged + runs_or_files(word, many, given)
    return flagged + _values(left[0], word)


def awaiting_value(parser: argparse.ArgumentParser, before: Sequence[str]) -> argparse.Action | None:
    """Return the flag whose value the next word must be, or None."""
    action = parser._option_string_actions.get(before[-1]) if before else None
    return action if action and action.nargs is None else None


def of_flags(parser: argparse.ArgumentParser, before: Sequence[str], word: str) -> list[str]:
    """Return completions of flags, and of the value of the flag before the word or in it."""
    flags = parser._option_string_actions
    name, equals, value = word.partition("=")
    if action := awaiting_value(parser, before):
        return _values(action, word)
    if equals and name in flags:
        return [f"{name}={one}" for one in _values(flags[name], value)]
    found = [flag for flag in flags if word.startswith("-") and flag.startswith(word)]
    last = flags.get(before[-1]) if before else None  # a value may follow it
    return found + (_values(last, word) if last and last.nargs == "?" else [])


def _values(action: argparse.Action, word: str) -> list[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    return paths(word) if action.metavar == "FILE" or action.dest in FILES else []


def paths(word: str) -> list[str]:
    """Return the files and folders that begin with `word`, folders with a final slash; hidden ones only after a dot."""
    place, slash, begun = word.rpartition("/")
    found = []
    with suppress(OSError, RuntimeError, ValueError):  # no such folder or user, or not readable
        for path in Path(place + slash).expanduser().iterdir():
            if path.name.startswith(begun) and (begun.startswith(".") or not path.name.startswith(".")):
                found.append(f"{place}{slash}{path.name}" + "/" * path.is_dir())
    return found


def runs_or_files(word: str, many: bool = False, given: Sequence[str] = ()) -> list[str]:
    """Return run folders below runs/ that begin with `word`, or else files. `many`: folders of several runs too."""
    runs = list(_runs_in(RUNS))
    there = [str(place) for place in (*runs, *({run.parent for run in runs} if many else ()))]
    return [run for run in there if run.startswith(word) and run not in given] or paths(word)


def _runs_in(folder: Path, deep: int = DEEP) -> Iterator[Path]:
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith((".", SET_ASIDE)) or not path.is_dir():
                continue
            if (path / CONFIG).is_file():
                yield path
            elif deep > 1:
                yield from _runs_in(path, deep - 1)
