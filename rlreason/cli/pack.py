"""Pack a run or a sweep into one file to hand in: settings, metrics, responses and grades, without weights.

Unpacked (tar xzf FILE), it is a folder that report, compare, inspect and health read as they read the original.
"""

import argparse
import tarfile
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CHECKPOINTS, CONFIG, MODEL, TENSORBOARD, WANDB
from rlreason.records.reader import runs_in
from rlreason.runtime.files import LOCK, explained, holder, whole
from rlreason.runtime.streams import Answer, Parser, refuse_target, run_folder
from rlreason.runtime.text import size

LEFT_OUT = {MODEL, CHECKPOINTS, WANDB, TENSORBOARD, LOCK}
SUFFIX = ".tar.gz"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason pack`."""
    parser.add_argument("folder", metavar="RUN|SWEEP", type=run_folder, help="what to pack")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the file (NAME{SUFFIX}, here)")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Write the file."""
    folder = arguments.folder
    runs = runs_in(folder) or [folder]
    if not (runs[0] / CONFIG).exists():
        raise ConfigError(f"RUN={folder} holds no run: give the folder of a run or of a sweep")
    if busy := next((run for run in runs if holder(run)), None):
        raise ConfigError(f"RUN={busy} is under way: wait for its end")
    name = folder.resolve().name
    out = arguments.out or Path(f"{name}{SUFFIX}")
    refuse_target("--out", out)

    depth = 1 if runs == [folder] else 2  # behind the names of the runs of a sweep

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if LEFT_OUT.intersection(Path(member.name).parts[depth:]) else member

    with console.wait("packing"), explained(out), whole(out) as partial, tarfile.open(partial, "w:gz") as archive:
        archive.add(folder, name, filter=kept)
        files = sum(member.isfile() for member in archive.getmembers())
    taken = out.stat().st_size
    text = f"{out}: {size(taken)}, {files} files of {len(runs)} runs"
    return Answer(text, {"file": str(out), "bytes": taken, "files": files, "runs": len(runs)})
