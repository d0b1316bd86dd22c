"""Store a write-up in a repository: `python tools/keep_write_up.py COURSE RUNS FOLDER`.

FOLDER gets writeup.md, its pictures, and the metrics.jsonl of every run, one compressed archive
per sweep, with decimals cut to four significant digits: a few MB in total.
"""

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import METRICS, each_line
from rlreason.report.assignment import Found, write_markdown, write_up_of
from rlreason.runtime.files import whole

ARCHIVES = "metrics"
DIGITS = 4


def keep(course: str, runs: Path, out: Path) -> list[str]:
    """Write all of it into `out`; return what was broken in the folders, a line each."""
    document = write_up_of(course, runs)
    write_markdown(document, out)
    (out / ARCHIVES).mkdir(exist_ok=True)
    for read in document.used:
        folders = [run.folder for run in read.study.runs]
        with whole(out / ARCHIVES / f"{read.name}.tar.gz") as partial:
            partial.write_bytes(archive(read, folders, document.problems))
    return document.problems


def archive(found: Found, runs: list[Path], problems: list[str]) -> bytes:
    """Write RUN/metrics.jsonl of every run as .tar.gz, with the same bytes for the same runs."""
    packed_file = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed_file, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for run in sorted(set(runs)):
            if not (run / METRICS).exists():
                continue
            rows = each_line(run / METRICS, problems.append)
            lines = "".join(json.dumps(shortened(row), separators=(",", ":")) + "\n" for _, row in rows)
            info = tarfile.TarInfo(f"{found.name}/{run.name}/{METRICS}")
            info.size = len(lines.encode())
            tar.addfile(info, io.BytesIO(lines.encode()))
    return packed_file.getvalue()


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Round a row's decimals to four significant digits; whole numbers are unchanged.

    >>> shortened({"step": 123456, "loss": 0.0123456, "stop": None})
    {'step': 123456, 'loss': 0.01235, 'stop': None}
    """
    return {key: float(f"{of:.{DIGITS}g}") if isinstance(of, float) else of for key, of in row.items()}


def main(words: list[str]) -> None:
    """Run with the arguments COURSE RUNS FOLDER; print errors in one line."""
    if len(words) != 3:
        raise SystemExit("write python tools/keep_write_up.py COURSE RUNS FOLDER")
    try:
        for problem in keep(words[0], Path(words[1]), Path(words[2])):
            print(problem, file=sys.stderr)
    except (ConfigError, KeyError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
