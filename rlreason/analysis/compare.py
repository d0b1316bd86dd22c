"""Draw the best_of_n curves of several runs in one picture.

Runs that were measured differently are refused unless --mix-protocols allows them; then the picture says so.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.plot import draw_best_of_n
from rlreason.evaluation.protocol import refuse_mixture
from rlreason.evaluation.tables import curves_table
from rlreason.records.console import Console
from rlreason.runtime.streams import folded
from rlreason.runtime.verb import Answer, Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason compare`."""
    parser.add_run("folder of a run of algorithm=best_of_n", several=True)
    parser.add_argument("-o", type=Path, metavar="FILE", default=Path("best_of_n.png"), help="the picture")
    parser.add_argument("--mix-protocols", action="store_true", help="draw runs that were measured differently")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Draw the runs' curves and list their values; `ConfigError` where two runs were measured differently."""
    folders, picture = arguments.runs, arguments.o
    summaries = {folder.name or str(folder): read_summary(folder) for folder in folders}
    if len(summaries) < len(folders):
        raise ConfigError("two of the runs have folders of one name: rename one, so that they can be told apart")
    protocols = {name: s["protocol"] for name, s in summaries.items()}
    differences = refuse_mixture(protocols, allow=arguments.mix_protocols)
    lines = [folded(f"! {line}", console.width) for line in differences]
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
    return Answer("\n".join(lines), {"runs": runs, "protocol_differences": list(differences), "picture": picture})


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run of algorithm=best_of_n."""
    path = folder / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: give the folder of a finished run of algorithm=best_of_n") from error
    if "best_of_n" not in summary:
        raise ConfigError(f"{folder} is no run of algorithm=best_of_n: give one that is")
    return summary
