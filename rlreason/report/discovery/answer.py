"""What `rlreason report` says of discover runs: the figures of each, and where their report lies."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, SCORE_PICTURE
from rlreason.report.discovery.read import read_log
from rlreason.report.discovery.write import write_joint_report, write_run_report
from rlreason.runtime.verb import Answer


def report_of(folders: Sequence[Path], out: Path) -> Answer:
    """Write the report of these runs into `out`, and say what each came to."""
    record = record_in(folders)
    alone = len(folders) == 1 and folders[0].resolve() == out.resolve()
    written = write_run_report(out, record) if alone else write_joint_report(folders, record, out)
    lines, figures = [], []
    for folder in folders:
        with suppress(ConfigError):  # the report names it
            log = read_log(folder)
            told = {"run": str(folder), "strategy": log.strategy, "model": log.model, "seed": log.seed}
            figures.append(told | {"score": log.best.score, "calls": log.calls, "ended": log.ended})
            state = "" if log.ended is not None else ", not ended"
            lines.append(f"{folder}: {log.best.score} {log.unit} in {log.calls} calls{state}")
    text = "\n".join([*lines, "", f"report: {written} (with {SCORE_PICTURE})"])
    return Answer(text, {"runs": figures, "markdown": str(written), "picture": str(out / SCORE_PICTURE)})


def record_in(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What others reached on the problem, as the first of the runs has it that tells."""
    for folder in folders:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            told = json.loads((folder / CONVERSATION).read_text(encoding="utf-8")).get("record")
            if isinstance(told, list) and told:
                return [row for row in told if isinstance(row, dict)]
    return []
