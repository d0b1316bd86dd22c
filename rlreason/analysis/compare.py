"""`python -m rlreason.jobs.compare RUN RUN ... [-o FILE]`: the best_of_n curves of several runs in one picture.

Runs that were measured differently are refused, unless told to; then the picture says so. It knows files only.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.cli.entry import Parser, answered, ended
from rlreason.errors import ConfigError
from rlreason.evaluation.plot import draw_best_of_n
from rlreason.evaluation.protocol import refuse_mixture
from rlreason.evaluation.tables import curves_table
from rlreason.records.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    return answered(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m rlreason.jobs.compare", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run of algorithm=best_of_n")
    parser.add_argument("-o", type=Path, metavar="FILE", default=Path("best_of_n.png"), help="the picture")
    parser.add_argument("--mix-protocols", action="store_true", help="draw runs that were measured differently")
    chosen = parser.parse_args(arguments)
    compare(chosen.runs, chosen.o, chosen.mix_protocols)


def compare(folders: Sequence[Path], picture: Path, mix: bool) -> None:
    console = Console()
    summaries = {folder.name or str(folder): read_summary(folder) for folder in folders}
    if len(summaries) < len(folders):
        raise ConfigError("two of the runs have folders of one name: rename one, so that they can be told apart")
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


def read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: give the folder of a finished run of algorithm=best_of_n") from error
    if "best_of_n" not in summary:
        raise ConfigError(f"{folder} is no run of algorithm=best_of_n: give one that is")
    return summary


if __name__ == "__main__":
    ended(lambda: _main(None))
