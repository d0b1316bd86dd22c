"""List the runs and sweeps below DIR, a line each, the newest last: when, what was typed, how far, how good, how large.

A sweep is one line, with the accuracy of its best run. `last` in place of a RUN means the newest of these in every
subcommand, as in `rlreason report last`.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.records.reader import RunFolder, runs_in, settings_in, written_at
from rlreason.runtime.streams import Answer, Parser
from rlreason.runtime.text import aligned, shorten, size
from rlreason.sweeps.state import FILE, RunState, read_state, refreshed

RUNS = Path("runs")
LAST = "last"
COLUMNS = ("started", "status", "steps", "accuracy", "size", "model, data", "folder", "typed")
TYPED_CHARS = 70


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason ls`."""
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=RUNS, help=f"where to look ({RUNS})")


def main(arguments: argparse.Namespace, console: object) -> Answer:
    """List what lies below the folder."""
    if not arguments.folder.is_dir():
        raise ConfigError(f"DIR={arguments.folder} is no folder: give the one that runs were written below")
    found = sorted((entry_of(path) for path in folders_below(arguments.folder)), key=lambda entry: entry["started"])
    if not found:
        return Answer(f"no runs below {arguments.folder}", [])
    return Answer(aligned([COLUMNS, *map(cells_of, found)]), found)


def folders_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and sweeps, also of one that is given itself; the runs of a sweep are not listed."""
    if (folder / CONFIG).exists() or (folder / FILE).exists():
        yield folder
        return
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
            yield from folders_below(inner)


def newest(
    folder: Path, single: bool, typed: str = f"RUN={LAST}", rank: Callable[[Path], int] = lambda path: 1
) -> Path:
    """Return the run or sweep below a folder whose status was written last; `single`: a run, also one of a sweep.

    `typed`: the word in place of which it is. Those of a lower `rank` come after all others, those of 0 do not count.
    """
    found = list(folders_below(folder)) if folder.is_dir() else []
    runs = {path: runs_in(path) or [path] for path in found}
    if single:
        runs = {run: [run] for of in runs.values() for run in of}
    when = {p: (rank(p), max((written_at(run) or 0 for run in of), default=0)) for p, of in runs.items() if rank(p)}
    if not when:
        raise ConfigError(f"{typed}: there is no run for it below {folder}: give the folder of one")
    return max(when, key=lambda path: when[path])


def entry_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a run or sweep for `--json`; None where one is unknown.

    Of a sweep: its runs that have ended, of all, and the best accuracy.
    """
    of: Any
    done: int | None
    if (folder / FILE).exists():
        state = read_state(folder, lambda _: None)
        kind, typed, status, runs = "sweep", state.command, state.status, state.runs
        done, of = sum(run.of_its_own for run in runs), len(runs)
        settings = next(map(settings_of, runs_in(folder)), {})
    else:
        reader, settings = RunFolder(folder, lambda _: None), settings_of(folder)
        run = refreshed(RunState(folder.name, [], {}, 0), folder.parent, lambda _: None)
        kind, typed, status, runs = "run", str(reader.provenance.get("command") or ""), run.status, [run]
        steps = (int(row["rollout_step"]) for row in reader.metrics if row.get("rollout_step") is not None)
        done, of = max(steps, default=None), settings.get("n_steps")
    return {
        "folder": str(folder),
        "kind": kind,
        "started": min((run.started for run in runs if run.started), default=changed_at(folder)),
        "typed": typed.removeprefix("python -m rlreason").strip(),
        "status": status,
        "done": done,
        "of": of,
        "accuracy": max((run.figure for run in runs if run.figure is not None), default=None),
        "bytes": bytes_in(folder),
        "of_what": of_what(settings),
    }


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings by their dotted names; {} where they cannot be read, which must not end the list."""
    try:
        return settings_in(folder)
    except ConfigError:
        return {}


def of_what(settings: Mapping[str, Any]) -> str:
    """Return the names of a run's model and data; of discovery, its problem and the model at the endpoint."""
    names = (settings.get(key) for key in ("problem", "client.model", "model.name", "data.name"))
    return ", ".join(str(name) for name in names if name)


def changed_at(folder: Path) -> str:
    """Return when a folder without provenance was last changed, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(folder.stat().st_mtime))


def bytes_in(folder: Path) -> int:
    """Return the bytes that a folder takes on the disk; a file with several links counts once."""
    files = {(s.st_dev, s.st_ino): s.st_size for p in folder.rglob("*") if p.is_file() and (s := p.lstat())}
    return sum(files.values())


def cells_of(entry: dict[str, Any]) -> list[str]:
    """Format an entry as the cells of its line."""
    accuracy, unit, best, steps = "", "steps", "", ""
    if entry["kind"] == "sweep":
        unit, best = "runs", "best "
    if entry["accuracy"] is not None:
        accuracy = f"{best}{entry['accuracy']:.3f}"
    if entry["done"] is not None:
        steps = f"{entry['done']} {unit}" if entry["of"] is None else f"{entry['done']}/{entry['of']} {unit}"
    return [
        entry["started"][:16].replace("T", " "),
        entry["status"],
        steps,
        accuracy,
        size(entry["bytes"]),
        entry["of_what"],
        entry["folder"],
        shorten(entry["typed"], TYPED_CHARS),
    ]
