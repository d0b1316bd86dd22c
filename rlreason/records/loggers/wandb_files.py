"""What W&B has kept on this disk of a run: its `.wandb` files, of which each part of a run that went on has one.

They are in LevelDB's log format: after a header of 7 bytes blocks of 32 KiB, in which a record may stand in several
pieces. The end of a file is missing where its process was killed.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlreason.records.loggers.base import Sent

HEADER, BLOCK = 7, 32768
FULL, FIRST, LAST = 1, 2, 4  # kinds of pieces


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, in their order."""
    data, position, whole = path.read_bytes(), HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        start, position = position + HEADER, position + HEADER + length
        if not FULL <= kind <= LAST or position > len(data):
            return
        whole = data[start:position] if kind in (FULL, FIRST) else whole + data[start:position]
        if kind in (FULL, LAST):
            yield whole


def rows(path: Path) -> Iterator[dict[str, str]]:
    """What was logged, as JSON by its name; `_step` is W&B's own counter."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]  # made when it is imported
    for data in records(path):
        record = record_type.FromString(data)
        if record.HasField("history"):
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def parts(folder: Path, run_id: str) -> list[Path]:
    """The files of a run in W&B's folder, oldest first; those that hold nothing are left out."""
    found = folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(
        (path for path in found if path.stat().st_size > HEADER),
        key=lambda path: path.parent.name.rpartition("run-")[2],
    )


def sent_in(files: list[Path], received: int | None = None) -> tuple[Sent, int]:
    """(what stands in the files, the `_step` after it); `received`: only so many steps have reached the server."""
    sent, following = Sent(), 0
    for path in files:
        for row in rows(path):
            step = int(row.get("_step", 0))
            if received is not None and step >= received:
                continue
            following = max(following, step + 1)
            if table := _table(row, path.parent / "files"):
                sent.tables[table] += 1
            elif not any(name.startswith("generations/") for name in row):
                sent.add({name: value for name, value in row.items() if not name.startswith("_")})
    return sent, following


def _table(row: Mapping[str, str], folder: Path) -> tuple[str, int] | None:
    """(kind, step) of the table in a row, which stands in a file of its own."""
    place = next((name for name in row if name.startswith("generations/") and name.endswith("/path")), None)
    if place is None:
        return None
    path = folder / json.loads(row[place])
    if not path.is_file():
        return None
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    return place.split("/")[1], int(found["data"][0][0])
