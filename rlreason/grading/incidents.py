"""A bounded file of the pairs on which a worker ran out of time, out of memory or failed: one JSON line each.

It keeps the answer and the ground truth, shortened, never the whole response.
"""

import json
import time
from pathlib import Path

from rlreason.grading.workers.pool import Reply
from rlreason.runtime.secrets import redacted

MAX_LINES = 1000
MAX_CHARS = 400


class IncidentLog:
    """Appends until the limit. A file that cannot be written does not stop a run; `failed` says why it cannot."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self.left = MAX_LINES
        self.failed = ""

    def add(self, answer: str, ground_truth: str, reply: Reply) -> None:
        """One line for the pair and its result; nothing beyond the limit or without a file."""
        if self.path is None or not self.left:
            return
        self.left -= 1
        record = {
            "time": round(time.time(), 1),
            "status": reply.status,
            "error": redacted(reply.error),
            "answer": answer[:MAX_CHARS],
            "answer_chars": len(answer),
            "gold": ground_truth[:MAX_CHARS],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            self.left, self.failed = 0, str(error)
