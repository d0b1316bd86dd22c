"""Draw the best_of_n curves of several runs in one picture.

Runs that were measured differently are refused unless --mix-protocols allows them; then the picture says so. Unfinished
runs are left out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.plot import draw_best_of_n
from rlreason.evaluation.protocol import refuse_mixture
from rlreason.evaluation.tables import curves_table
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_PICTURE, SUMMARY
from rlreason.records.picture import FORMATS
from rlreason.records.reader import RunFolder, runs_in
from rlreason.runtime.streams import folded
from rlreason.runtime.verb import Answer, Parser, refuse_target


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason compare`."""
    parser.add_run("folder of a run of algorithm=best_of_n, or of a sweep of them", several=True)
    parser.add_argument("-o", type=Path, metavar="FILE", default=Path(BEST_OF_N_PICTURE), help="the picture")
    parser.add_argument("--mix-protocols", action="store_true", help="draw runs that were measured differently")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Draw the runs' curves and list their values; `ConfigError` where two runs were measured differently."""
    refuse_target("-o", arguments.o)
    if (suffix := arguments.o.suffix[1:].lower() or "png") not in FORMATS:
        raise ConfigError(
            f"-o {arguments.o}: no picture can be written as .{suffix}: choose one of {', '.join(FORMATS)}"
        )
    summaries, unfinished = finished_runs(arguments.runs)
    protocols, picture = {name: s["protocol"] for name, s in summaries.items()}, arguments.o
    differences = refuse_mixture(protocols, allow=arguments.mix_protocols)
    left_out = [f"{folder} is left out: it has not finished ({status})" for folder, status in unfinished.items()]
    lines = [folded(f"! {line}", console.width) for line in (*left_out, *differences)]
    for name, s in summaries.items():
        lines += [f"\n{name}, protocol {s['protocol']['hash']}"]
        lines += [curves_table(s["n_list"], s["best_of_n"], console.width)]
    hashes = list(dict.fromkeys(protocol["hash"] for protocol in protocols.values()))
    subtitle = f"protocol {hashes[0]}" if len(hashes) == 1 else f"MIXED protocols: {', '.join(hashes)}"
    drawn = {name: (s["n_list"], s["best_of_n"]) for name, s in summaries.items()}
    with console.wait("drawing"):
        draw_best_of_n(picture, drawn, "best of N", f"{subtitle}; bands: 95%, over problems")
    lines += [folded(f"\ncurves: {picture}", console.width)]
    runs = {
        name: {"protocol": s["protocol"]["hash"], "n_list": s["n_list"], "best_of_n": s["best_of_n"]}
        for name, s in summaries.items()
    }
    return Answer(
        "\n".join(lines),
        {"runs": runs, "protocol_differences": list(differences), "unfinished": unfinished, "picture": picture},
    )


def finished_runs(folders: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], dict[str, str | None]]:
    """(summaries by name, statuses of unfinished runs by folder) of these runs and of the runs of these sweeps.

    Raises `ConfigError` where none has finished, and where two of them have one name.
    """
    summaries, unfinished = dict[str, dict[str, Any]](), dict[str, str | None]()
    for folder in (run for given in folders for run in runs_in(given) or [given]):
        run, name = RunFolder(folder), folder.name or str(folder)
        if name in summaries:
            raise ConfigError("two of the runs have folders of one name: rename one, so that they can be told apart")
        summary = best_of_n_summary(run)
        if summary is None:
            unfinished[str(folder)] = run.status
        else:
            summaries[name] = summary
    if not summaries:
        raise ConfigError("none of these runs has finished: type the command of one again to go on with it")
    return summaries, unfinished


def best_of_n_summary(run: RunFolder) -> dict[str, Any] | None:
    """The summary of a finished run of algorithm=best_of_n; None where it is still under way or was interrupted."""
    if run.summary is None:
        if run.status is not None and run.setting("algorithm") == "best_of_n":
            return None
        raise ConfigError(f"{run.path} holds no {SUMMARY}: give the folder of a finished run of algorithm=best_of_n")
    if not {"best_of_n", "n_list", "protocol"} <= run.summary.keys():
        raise ConfigError(f"{run.path} is no run of algorithm=best_of_n: give one that is")
    if not _is_whole(run.summary):
        raise ConfigError(f"{run.path / SUMMARY} holds no curves that can be read: leave this run out, or repeat it")
    return run.summary


def _is_whole(summary: dict[str, Any]) -> bool:
    """Whether a summary has its protocol's hash and, for each way to choose, (value, low, high) at each N."""
    try:
        n_list, ways = list(map(float, summary["n_list"])), summary["best_of_n"].values()
        whole = isinstance(summary["protocol"]["hash"], str) and min(n_list) > 0 and len(ways) > 0
        return whole and all(len(w) == len(n_list) and all(len([*map(float, p)]) == 3 for p in w) for w in ways)
    except (TypeError, ValueError, LookupError, AttributeError):
        return False
