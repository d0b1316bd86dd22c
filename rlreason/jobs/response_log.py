"""Responses on disk as they finish, so that an interruption loses none and the same command goes on.

    responses.unfinished.jsonl    a line per graded response, as it ends; first a line that says what was asked
    responses.jsonl               all of them in order, written whole at the end

A torn last line is what a killed process leaves: it is dropped. It must not know models, engines or settings.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.errors import ConfigError, DataError
from rlreason.records.status import write_status
from rlreason.records.writer import finite, provenance, refuse_occupied, response_row, sample_of, set_aside
from rlreason.runtime.atomic_files import append_line, write_whole
from rlreason.runtime.stderr_log import log_stderr_in
from rlreason.types import Problem, Sample

#: Settings that an interrupted job may go on without: they change its speed, its memory or what it shows.
HARMLESS = ("threads", "log_generations", "micro_batch_tokens", "rollout.max_rows", "rollout.kv_cache_gb")
UNFINISHED, WHOLE = "responses.unfinished.jsonl", "responses.jsonl"


def enter(folder: Path, config: str, say: Callable[[str], None]) -> bool:
    """Make the folder this job's own; whether it goes on with an interrupted job of the same kind and settings.

    What any other broken-off run left is set aside and said. A job of the same kind but with other settings is
    refused: it was probably meant to go on, and its responses must not be mixed with others.
    """
    refuse_occupied(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record, path = provenance(), folder / "config.yaml"
    again = path.exists() and (folder / UNFINISHED).exists()
    before = path.read_text(encoding="utf-8") if again else ""
    if again and kind_of(before) == kind_of(config):
        if different := changed(before, config):
            raise ConfigError(
                f"hydra.run.dir={folder} holds an interrupted run with other settings ({different}): "
                "type its command again to go on with it, or choose another folder"
            )
        earlier = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        record["earlier_parts"] = [*earlier.pop("earlier_parts", []), earlier]  # each may be of another commit
    else:
        again = False
        if aside := set_aside(folder):
            say(f"a broken-off run was here: its records are now in {aside}")
    write_status(folder, "running")
    log_stderr_in(folder)
    write_whole(folder / "provenance.json", json.dumps(record, indent=2) + "\n")
    write_whole(path, config)
    return again


def kind_of(config: str) -> Any:
    """The algorithm of a run that left this config; None where it is no config at all."""
    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return None
    return settings.get("algorithm") if isinstance(settings, dict) else None


def changed(before: str, now: str) -> str:
    """The first setting in which two configs differ, in words; empty when only speed and display do.

    >>> changed("seed: 0\\nsampling: {max_tokens: 48}", "seed: 0\\nsampling: {max_tokens: 64}")
    'sampling.max_tokens=48 there, 64 here'
    """
    old, new = _flat(yaml.safe_load(before)), _flat(yaml.safe_load(now))
    keys = [k for k in dict.fromkeys((*old, *new)) if old.get(k) != new.get(k) and k not in HARMLESS]
    return f"{keys[0]}={old.get(keys[0])} there, {new.get(keys[0])} here" if keys else ""


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    return {key: v for name, child in node.items() for key, v in _flat(child, f"{prefix}{name}.").items()}


class Store:
    """The responses that are already there, by problem; and a log for those that come."""

    def __init__(self, folder: Path, identity: str, problems: Sequence[Problem], n: int) -> None:
        """`identity` says what is asked of whom: responses to anything else are refused.

        Problems that lack some of their `n` responses are asked again as a whole.
        """
        self.path, self.n = folder / UNFINISHED, n
        self._problems = {p.id: p for p in problems}
        lines = _lines(self.path)
        if lines and lines[0].get("identity") != identity:
            raise ConfigError(
                f"{self.path} holds responses of another model or to other problems than these settings now give "
                "(a file behind them has changed): choose another hydra.run.dir"
            )
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for row in lines[1:]:
            found.setdefault(row["problem_id"], {})[row["sample"]] = row
        kept = {id: [rows[j] for j in range(n)] for id, rows in found.items() if len(rows) == n}
        self.samples = {id: [sample_of(row) for row in rows] for id, rows in kept.items()}
        again = [{"identity": identity}, *(row for rows in kept.values() for row in rows)]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in again))

    def add(self, number: int, sample: Sample) -> None:
        """Write a response down at once; `number` is its place among the responses to its problem."""
        row = row_of(sample, self._problems[sample.group], number)
        append_line(self.path, json.dumps(row | {"log_probs": sample.response.log_probs}))

    def finish(self, rows: Sequence[dict[str, Any]]) -> None:
        """All responses in order, under their right name. The log stays until the job's summary is written."""
        write_whole(self.path.with_name(WHOLE), "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def row_of(sample: Sample, problem: Problem, number: int) -> dict[str, Any]:
    """A saved response, in the form that training runs give theirs, and which of its problem's it is."""
    row: dict[str, Any] = finite(response_row(0, sample, problem) | {"sample": number})
    return row


def _lines(path: Path) -> list[dict[str, Any]]:
    """What is whole in the log; a last line without its end was being written when the process was killed."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON ({error.msg}): remove the line, or the file") from error
    return rows
