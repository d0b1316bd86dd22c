"""How a run that goes on from a checkpoint goes on in its services too: nothing twice, and nothing missing.

What was sent after the checkpoint comes again, and what a service had not yet kept when the run was killed is lost
there. So TensorBoard and Trackio count what they hold of the run; then all rows of the run folder are offered to them
once more, and those that come are, and what is there is passed over. Another service, such as W&B, is trusted to hold
what it was sent.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rlreason.records.files import EVALS, LOGGERS, ROLLOUTS, response_files
from rlreason.records.loggers.base import Logger, Row, Sent, Table
from rlreason.records.reader import RunFolder
from rlreason.runtime.atomic_files import write_whole


@dataclass(frozen=True)
class Resumed:
    """What will come again of what was sent: so many first rows, and these tables.

    The run folder is as it was at the checkpoint: `metrics.jsonl` is cut, later files of responses are gone.
    """

    rows_sent: int = 0
    tables_sent: frozenset[Table] = frozenset()


def caught_up(logger: Logger, rows: Sequence[Row], tables: Iterable[Table], resumed: Resumed) -> Sent:
    """Send what the service has lost of the rows that the run folder kept; returns what it holds of those to come.

    A lost table is not sent again: its responses are in the run folder.
    """
    sent = logger.sent()
    if sent is None:
        return Sent(tables=Counter(resumed.tables_sent), rows=resumed.rows_sent)
    for row in rows:
        if (left := sent.new_in(row)) is not None:
            logger.log(left)
    for name, step in tables:
        sent.has_table(name, step)
    return sent


def kept_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of the run folder as they were sent; what was not finite comes back as no number."""
    found = RunFolder(folder).metrics
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in found]


def kept_tables(folder: Path) -> Iterable[Table]:
    """The files of responses in the run folder."""
    for kind in (ROLLOUTS, EVALS):
        yield from ((kind, file.step) for file in response_files(folder, kind) if file.step is not None)


def identities(folder: Path, chosen: Iterable[str], goes_on: bool) -> dict[str, str]:
    """Logger -> the name that its service knows the run by. They stand in the run folder before anything is sent.

    `goes_on`: a logger that the run had before keeps its name.
    """
    path = folder / LOGGERS
    known: dict[str, str] = {}
    if goes_on and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        known = {name: str(told) for name, told in found.items()} if isinstance(found, dict) else {}
    known |= {name: uuid4().hex[:12] for name in chosen if name not in known}
    write_whole(path, json.dumps(known, indent=1) + "\n")
    return known
