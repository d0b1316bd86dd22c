"""The run folder: what was asked, with what, what was measured, what was said, and what came of it.

    config.yaml provenance.json status.json objective.md metrics.jsonl curves.png summary.json log.txt
    rollouts/step_00001.jsonl evals/step_00000.jsonl model/

Files that are written whole are written under another name and renamed, so that a file with its right name is
never half a file. `metrics.jsonl` grows by a line at a time. It must not know tensors or algorithms.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from rlreason import __version__
from rlreason.errors import ConfigError
from rlreason.records.status import write_status
from rlreason.runtime.atomic_files import append_line, write_whole
from rlreason.runtime.processors import usable_processors
from rlreason.runtime.signals import held
from rlreason.runtime.stderr_log import log_stderr_in
from rlreason.types import Grade, Problem, Response, Sample

CONTENTS = (
    "config.yaml", "status.json", "provenance.json", "objective.md", "metrics.jsonl", "curves.png",
    "grading_incidents.jsonl", "rollouts", "evals", "model", "model.partial", "wandb", "vllm.log", "log.txt",
    "responses.jsonl", "responses.unfinished.jsonl", "pass_rates.jsonl", "best_of_n.csv", "best_of_n.png", "inspect.md",
)  # fmt: skip
SET_ASIDE = "broken_off_"  # and a number: a folder in the run folder, for what an earlier run left there
MIRRORED_ROWS = 32  # of a step's responses go to the mirror; the run folder has all of them
PACKAGES = ("torch", "transformers", "math-verify", "hydra-core", "vllm", "flash-attn")


class MetricSink(Protocol):
    """A second sink for metrics, such as Weights & Biases; `place` says where a person finds them, empty if nowhere."""

    place: str

    def log(self, row: dict[str, float]) -> None: ...

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None: ...

    def finish(self, summary: dict[str, Any]) -> None: ...

    def abandon(self) -> None: ...


class RunWriter:
    """Writes one run folder. A finished run is never overwritten; what a broken-off one left is set aside."""

    def __init__(self, folder: Path, config: str, mirror: MetricSink | None = None) -> None:
        self.folder, self.mirror = folder, mirror
        folder.mkdir(parents=True, exist_ok=True)
        self.set_aside = set_aside(folder)
        write_status(folder, "running")
        log_stderr_in(folder)
        write_whole(folder / "config.yaml", config)
        write_whole(folder / "provenance.json", json.dumps(provenance(), indent=2) + "\n")
        self.train_step = 0.0  # of the newest row
        self.metrics_path = folder / "metrics.jsonl"
        write_whole(self.metrics_path, "")

    def mirror_to(self, sink: MetricSink | None) -> None:
        """Log to this sink as well from now on; it is made after the folder, in which it logs."""
        self.mirror = sink

    def metrics(self, row: dict[str, float]) -> None:
        """One flat row, every counter of `counters.py` in it."""
        with held():
            append_line(self.metrics_path, json.dumps(finite(row), allow_nan=False))
            self.train_step = row.get("train_step", 0)
        if self.mirror:
            self.mirror.log(row)

    def responses(
        self,
        kind: str,
        step: int,
        samples: Sequence[Sample],
        problems: Iterable[Problem],
        *,
        label: str = "",
        prompts: Sequence[str] = (),
    ) -> None:
        """Every response of a step with its grade: `rollouts/` from training, `evals/` from evaluation.

        The file is named by its step, or by a `label` that sorts beside it. `prompts`: the text that each was a
        response to, where it is to stand in the file; rollouts have it as token ids alone, for their size.
        """
        by_id = {p.id: p for p in problems}
        rows = [finite(response_row(step, s, by_id[s.group])) for s in samples]
        for row, prompt in zip(rows, prompts, strict=False):
            row["prompt"] = prompt
        if kind == "rollouts":  # what a loss on them divides by, where training scored them
            for row, s in zip(rows, samples, strict=True):
                row |= {"trainer_log_probs": [round(lp, 5) for lp in s.log_probs]} if s.log_probs else {}
        path = self.folder / kind / f"{label or f'step_{step:05d}'}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        if self.mirror:
            self.mirror.table(kind, step, rows[:MIRRORED_ROWS])

    def document(self, name: str, text: str) -> None:
        """A text for people, such as the objective's card."""
        write_whole(self.folder / name, text)

    def summary(self, summary: dict[str, Any]) -> None:
        """Written last: a folder with `summary.json` holds a run that came to an end of its own."""
        with held():
            write_status(self.folder, summary["status"], summary.get("reason", ""))
            write_whole(self.folder / "summary.json", json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
        if self.mirror:
            self.mirror.finish(summary)


def refuse_occupied(folder: Path) -> None:
    """Before anything is computed: a folder with a finished run, or with somebody else's files, keeps them."""
    if (folder / "summary.json").exists():
        raise ConfigError(f"hydra.run.dir={folder} holds a finished run: choose another folder, or move that one away")
    found = [name for name in CONTENTS if (folder / name).exists()]
    if found and not (folder / "provenance.json").exists():
        raise ConfigError(f"hydra.run.dir={folder} holds {found[0]}, which no run left there: choose another folder")


def set_aside(folder: Path) -> Path | None:
    """Move what a broken-off run left into `broken_off_1/` (2, 3 ...): its records are kept, and not mixed in."""
    found = [name for name in CONTENTS if (folder / name).exists()]
    if not found:
        return None
    number = 1
    while (aside := folder / f"{SET_ASIDE}{number}").exists():
        number += 1
    aside.mkdir()
    for name in found:
        os.replace(folder / name, aside / name)
    return aside


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite: JSON has no word for them.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def response_row(step: int, s: Sample, problem: Problem) -> dict[str, Any]:
    """Enough to read the response, to grade it again, and to compute any loss on it without sampling."""
    return {
        "step": step,
        "problem_id": s.group,
        "question": problem.question,
        "gold": problem.answer,
        "response": s.response.text,
        **grade_columns(s.grade),
        "advantage": round(s.advantage, 6),
        "kept": s.has_loss,
        "length": len(s.response.token_ids),
        "entropy": None if s.entropy is None else round(s.entropy, 5),
        "facts": problem.facts,
        **({} if s.prompt_grade is None else {"prompt_reward": grade_columns(s.prompt_grade)}),
        "finish_reason": s.response.finish_reason,
        "weight_version": s.response.weight_version,
        "prompt_ids": s.response.prompt_ids,
        "token_ids": s.response.token_ids,
        "log_probs": [round(lp, 5) for lp in s.response.log_probs],
    }


def grade_columns(grade: Grade) -> dict[str, Any]:
    return {
        "reward": grade.reward,
        "format_reward": grade.format,
        "answer_reward": grade.answer,
        "outcome": grade.outcome,
        "path": grade.path,
    }


def grade_of(row: dict[str, Any]) -> Grade:
    return Grade(row["format_reward"], row["answer_reward"], row["reward"], row["outcome"], row["path"])


def sample_of(row: dict[str, Any]) -> Sample:
    """The sample that a row was written from: what was said, and its grade."""
    response = Response(
        problem_id=row["problem_id"],
        prompt_ids=row["prompt_ids"],
        token_ids=row["token_ids"],
        log_probs=row["log_probs"],
        text=row["response"],
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
    )
    beside = grade_of(row["prompt_reward"]) if "prompt_reward" in row else None
    return Sample(response, grade_of(row), beside, log_probs=row.get("trainer_log_probs"))


def provenance() -> dict[str, Any]:
    """What a stranger needs to know to repeat the run on another machine."""
    return {
        "rlreason": __version__,
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "rlreason", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": usable_processors(),  # that this process may use
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed.strip() else "")
