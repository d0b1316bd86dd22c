"""Show in what two runs differ: settings, code, data, versions and machine, and whether their figures are equal.

The first RUN is `then`, the second `now`. Figures are equal if metrics, responses and weights agree bit for bit, but
for times.
"""

import argparse

from rlreason.cli.rerun import EARLY, LATE
from rlreason.records.console import Console
from rlreason.records.provenance import differences
from rlreason.records.reader import RunFolder, compared
from rlreason.runtime.streams import Answer, Parser, run_folder


def add_arguments(parser: Parser) -> None:
    """Add both runs."""
    parser.add_run("the run from then")
    parser.add_argument("other", metavar="RUN", type=run_folder, help="the run from now")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Compare the folders of two runs."""
    then, now = RunFolder(arguments.run), RunFolder(arguments.other)
    settings = differences(then.settings, now.settings, list(then.settings | now.settings))
    settings += [f"{key}: in one of them alone" for key in sorted(then.settings.keys() ^ now.settings.keys())]
    environment = differences(then.provenance, now.provenance, (*EARLY, *LATE))
    with console.wait("comparing"):
        equal, figures = compared(then, now)
    lines = [f"{then.path} (then) and {now.path} (now)"]
    for title, found in (("settings", settings), ("code, data and machine", environment), ("figures", figures)):
        lines += [f"{title}:", *(f"  {line}" for line in found or ["equal"])]
    entry = {"settings": settings, "environment": environment, "equal": equal, "figures": figures}
    return Answer("\n".join(lines), entry | {"then": str(then.path), "now": str(now.path)})
