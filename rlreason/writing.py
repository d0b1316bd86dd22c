"""Files that are never half a file."""

import os
from pathlib import Path

from rlreason.signals import held, removed_if_left


def write_whole(path: Path, text: str) -> None:
    """Write beside the place and rename: readers see the old file or the new one, never half."""
    partial = path.with_name(path.name + ".partial")
    with held(), removed_if_left(partial):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
