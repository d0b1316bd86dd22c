"""`python -m rlreason.jobs.compare RUN RUN ... [-o FILE]`: the best_of_n curves of several runs in one picture.

Runs that were measured differently are refused, unless told to; then the picture says so. Unfinished runs are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.cli.entry import Parser, answered, ended
from rlreason.errors import ConfigError
from rlreason.evaluation.plot import draw_best_of_n
from rlreason.evaluation.protocol import refuse_mixture
from rlreason.evaluation.tables import curves_table
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_PICTURE, SUMMARY
from rlreason.records.reader import RunFolder, runs_in


def main(arguments: Sequence[str] | None = None) -> int:
    return answered(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m rlreason.jobs.compare", description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder of a run of algorithm=best_of_n, or of several"
    )
    parser.add_argument("-o", type=Path, metavar="FILE", default=Path(BEST_OF_N_PICTURE), help="the picture")
    parser.add_argument("--mix-protocols", action="store_true", help="draw runs that were measured differently")
    chosen = parser.parse_args(arguments)
    compare(chosen.runs, chosen.o, chosen.mix_protocols)


def compare(folders: Sequence[Path], picture: Path, mix: bool) -> None:
    """Draw the curves of these runs, or of a sweep's runs, into one picture."""
    console, summaries = Console(), dict[str, dict[str, Any]]()
    for folder in (run for given in folders for run in runs_in(given) or [given]):
        name, summary = folder.name or str(folder), best_of_n_summary(folder)
        if name in summaries:
            raise ConfigError("two of the runs have folders of one name: rename one, so that they can be told apart")
        if summary is None:
            console.say(f"! {folder} is left out: it has not finished ({RunFolder(folder).status})")
        else:
            summaries[name] = summary
    if not summaries:
        raise ConfigError("none of these runs has finished: type the command of one again to go on with it")
    for line in refuse_mixture({name: s["protocol"] for name, s in summaries.items()}, allow=mix):
        console.say(f"! {line}")
    for name, s in summaries.items():
        console.say(f"\n{name}, protocol {s['protocol']['hash']}")
        console.table(curves_table(s["n_list"], s["best_of_n"], console.width))
    hashes = dict.fromkeys(s["protocol"]["hash"] for s in summaries.values())
    subtitle = f"protocol {next(iter(hashes))}" if len(hashes) == 1 else f"MIXED protocols: {', '.join(hashes)}"
    drawn = {name: (s["n_list"], s["best_of_n"]) for name, s in summaries.items()}
    with console.wait("drawing"):
        draw_best_of_n(picture, drawn, "best of N", f"{subtitle}; bands: 95%, over problems")
    console.say(f"\ncurves: {picture}")


def best_of_n_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run of algorithm=best_of_n; None where it is still under way or was interrupted."""
    run = RunFolder(folder)
    if run.summary is None:
        if run.status is not None and run.setting("algorithm") == "best_of_n":
            return None
        raise ConfigError(f"{folder} holds no {SUMMARY}: give the folder of a finished run of algorithm=best_of_n")
    if not {"best_of_n", "n_list", "protocol"} <= run.summary.keys():
        raise ConfigError(f"{folder} is no run of algorithm=best_of_n: give one that is")
    return run.summary


if __name__ == "__main__":
    ended(lambda: _main(None))
