"""Responses on disk as they finish, so that an interruption loses none and the same command goes on.

responses.unfinished.jsonl    a line per graded response, as it ends; first a line that says what was asked
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.records.files import UNFINISHED
from rlreason.records.lines import read_lines
from rlreason.records.rows import TO_LEARN, Row, lacks, numbered_row, sample_of
from rlreason.runtime.atomic_files import append_line, write_whole
from rlreason.runtime.streams import print_stderr
from rlreason.types import Problem, Sample


class ResponseLog:
    """The responses that are already there, by problem; and a log for those that come."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        problems: Sequence[Problem],
        n: int,
        say: Callable[[str], None] = print_stderr,
    ) -> None:
        """`identity` says what is asked of whom: responses to anything else are refused with a `ConfigError`.

        Problems that lack some of their `n` responses are asked again as a whole, also where a line is broken, as the
        last one is that a killed process wrote.
        """
        self.path = folder / UNFINISHED
        self._problems = {p.id: p for p in problems}

        def wrong(row: Row) -> str:
            return "" if row.keys() == {"identity"} else lacks(row, (*TO_LEARN, "sample"))

        lines = [row for _, row in read_lines(self.path, wrong, say)] if self.path.exists() else []
        if lines and lines[0].get("identity") != identity:
            raise ConfigError(
                f"{self.path} holds responses of another model or to other problems than these settings now give "
                "(a file behind them has changed): choose another hydra.run.dir"
            )
        found: dict[str, dict[int, Row]] = {}
        for row in (row for row in lines if "problem_id" in row):
            found.setdefault(row["problem_id"], {})[row["sample"]] = row
        kept = {id: rows for id, rows in found.items() if rows.keys() == set(range(n))}
        self.samples = {id: [sample_of(rows[j]) for j in range(n)] for id, rows in kept.items()}
        again = [{"identity": identity}, *(rows[j] for rows in kept.values() for j in range(n))]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in again))

    def add(self, number: int, sample: Sample) -> None:
        """Write a response down at once; `number` is its place among the responses to its problem."""
        row = numbered_row(sample, self._problems[sample.group], number)
        append_line(self.path, json.dumps(row | {"log_probs": sample.response.log_probs}))

    def remove(self) -> None:
        """To be called when everything that follows from the responses is written."""
        self.path.unlink(missing_ok=True)
