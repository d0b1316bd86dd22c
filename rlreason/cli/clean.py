"""List checkpoints that only take space, and remove them with --yes.

Of a run that was interrupted, failed or diverged these are all its checkpoints, without which it cannot be resumed;
of a finished run the optimizer's moments in them. Models, responses and figures stay, and so does a run under way.
RUN may also be a sweep, or a folder with several of them.
"""

import argparse
from typing import Any

from rlreason.cli.ls import bytes_in, folders_below
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import checkpoints_in, moments_in, remove, remove_moments
from rlreason.records.reader import exit_code_of_status, read_status, runs_in, settings_in
from rlreason.runtime.files import holder
from rlreason.runtime.streams import Answer, Parser, run_folder
from rlreason.runtime.text import size


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason clean`."""
    help_runs = "run, sweep, or a folder of them"
    parser.add_argument("runs", metavar="RUN", type=run_folder, nargs="+", help=help_runs)
    parser.add_argument("--yes", action="store_true", help="remove what is listed")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """List what would be removed, or remove it."""
    found = [path for folder in arguments.runs for path in folders_below(folder)]
    if not found:
        raise ConfigError(f"RUN={arguments.runs[0]} holds no runs: give a run, a sweep, or the folder above them")
    rows = list[dict[str, Any]]()
    for run in [run for path in found for run in runs_in(path) or [path]]:
        if holder(run):
            console.say(f"{run} is under way and stays as it is")
            continue
        status = read_status(run) or "failed"
        finished = status == "finished"
        if settings_in(run).get("checkpoint.keep_final") if finished else exit_code_of_status(status) == 0:
            continue  # it was asked to keep them, or may go on
        for checkpoint in checkpoints_in(run):
            if amount := moments_in(checkpoint) if finished else bytes_in(checkpoint):
                what = "moments" if finished else "checkpoint"
                rows.append({"path": str(checkpoint), "what": what, "status": status, "bytes": amount})
                if arguments.yes and finished:
                    remove_moments(checkpoint)
                elif arguments.yes:
                    remove(checkpoint)
    total = sum(row["bytes"] for row in rows)
    lines = [f"{size(row['bytes']):>9}  {row['what']:<10}  {row['status']:<12}  {row['path']}" for row in rows]
    if not rows:
        lines = ["nothing to remove"]
    elif arguments.yes:
        lines.append(f"removed {size(total)}")
    else:
        lines.append(f"{size(total)} in all, and nothing is removed yet: add --yes")
    return Answer("\n".join(lines), {"removed": arguments.yes, "bytes": total, "entries": rows})
