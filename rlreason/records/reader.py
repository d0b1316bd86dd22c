"""Read a run: the files of its folder, its status (written here too), exit code and time; compare two bit for bit."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.leaves import flat
from rlreason.errors import ConfigError, ResourceError
from rlreason.records import files
from rlreason.records.files import (
    STATUS,
    SUMMARY,
    Note,
    ResponseFile,
    digest,
    each_line,
    read_json,
    response_files,
    write_json,
)
from rlreason.records.rows import Row
from rlreason.runtime.clock import GB, Clock
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few, redacted, shorten, visible

DIVERGED = 5
#: The exit code of each status.
STATUSES = {
    "running": None,  # under way, or killed without a chance to say so
    "finished": 0,
    "stopped": 0,  # by a rule that was asked for, as stopped:RULE
    "budget": 0,  # its hours, tokens or steps were spent
    "diverged": DIVERGED,  # the loss, the weights or the accuracy went astray, as diverged:RULE
    "interrupted": 130,  # by a signal
    "failed": 1,
}
RESOURCES = ResourceError.exit_code
#: In the errors of the system, of torch and of other libraries.
SHORTAGES = (
    "allocate memory", "CUDA out of memory", "CUDA error: out of memory", "No space left on device", "Disk quota",
)  # fmt: skip
TAIL_BYTES, TAIL_CHARS = 16_384, 200  # of a log that are read, and of a line that are shown


def exit_code_of_status(status: str) -> int | None:
    """Return the exit code of a status, whatever its rule.

    >>> exit_code_of_status("diverged:loss")
    5
    """
    return STATUSES[status.partition(":")[0]]


def ended_by_itself(status: str) -> bool:
    """Whether a run of this status ended as its settings provide and left a `summary.json`."""
    return exit_code_of_status(status) in (0, DIVERGED)


def known_status(status: str) -> str:
    """Return the status if it is in the table, else `failed`."""
    return status if status.partition(":")[0] in STATUSES else "failed"


def read_object(path: Path, say: Note = str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no such file, or a broken one, of which it will `say`."""
    with suppress(OSError, ValueError):
        if isinstance(value := read_json(path), dict):
            return value
    if path.is_file():
        say(f"{path} is left out: it is no JSON object")
    return None


def read_status(folder: Path) -> str | None:
    """Return the status in a run's `status.json`, else in its `summary.json`; None where neither can be read."""
    row = read_object(folder / STATUS) or read_object(folder / SUMMARY)
    return known_status(str(row.get("status", ""))) if row else None


def read_ending(folder: Path) -> dict[str, str]:
    """Return when and how the run ended: {"ended", "status", "reason"}; {} while it runs, or if it was killed."""
    row = read_object(folder / STATUS) or {}
    if row.get("status", "running") == "running":
        return {}
    return {"ended": str(row.get("time")), "status": str(row["status"]), "reason": str(row.get("reason", ""))}


def written_at(folder: Path) -> int | None:
    """Return when the folder's status was last written, in nanoseconds; None where it has none."""
    path = folder / STATUS
    return path.stat().st_mtime_ns if path.exists() else None


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ended with this error.

    >>> exit_code(KeyboardInterrupt()), exit_code(ConfigError("a wrong word")), exit_code(MemoryError())
    (130, 2, 4)
    """
    if isinstance(error, ConfigError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "exit_code", 130)
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return RESOURCES if short or any(text in str(error) for text in SHORTAGES) else 1


def write_status(folder: Path, status: str, reason: str = "") -> None:
    """Replace `status.json`: {"status", "reason", "time"}."""
    assert status == known_status(status)
    row = {"status": status, "reason": redacted(reason), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(folder / STATUS, row)


def time_summary(clock: Clock) -> dict[str, Any]:
    """Return seconds, also of each phase, tokens per second and the peak of memory in GB, for `summary.json`."""
    return {
        "seconds": round(clock.total(), 1),
        "phases": {name: round(value, 3) for name, value in clock.phases().items()},
        **{name: round(value, 4) for name, value in clock.overall().items()},
        "peak_gb": round(clock.peak() / GB, 3),
    }


def time_line(summary: Mapping[str, Any]) -> str:
    """Return the share of each phase of a summary, and the peak of memory, as a line.

    >>> time_line({"phases": {"train": 6.0, "rollout": 4.0}, "peak_gb": 1.25})
    'time       train 60%, rollout 40%; memory 1.2 GB'
    """
    phases: Mapping[str, float] = summary["phases"]
    total = sum(phases.values())
    shares = [f"{name} {value / total:.0%}" for name, value in sorted(phases.items(), key=lambda item: -item[1])]
    return f"time       {', '.join(shares)}; memory {summary['peak_gb']:.1f} GB"


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of the runs of a sweep, by name; [] where `folder` is a run's own, or has none."""
    inner = [] if (folder / files.CONFIG).exists() else folder.glob(f"*/{files.CONFIG}")
    return sorted(path.parent for path in inner if not path.parent.name.startswith((".", files.SET_ASIDE)))


def setting_in(settings: Mapping[str, Any], key: str) -> Any:
    """Return one of nested settings by its dotted name; None where there is none."""
    node: Any = settings
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


class RunFolder:
    """One run's folder; each of its files is read when it is needed. `say` prints what is broken."""

    def __init__(self, path: Path, say: Note = print_stderr) -> None:
        self.path, self._say = path, say

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """`provenance.json`: commit, command and versions; {} where there is none."""
        return read_object(self.path / files.PROVENANCE, self._say) or {}

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """`summary.json`; None where the run did not end by itself."""
        return read_object(self.path / files.SUMMARY, self._say)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run with its value, from `config.yaml`. `ConfigError` where it cannot be read."""
        with suppress(OSError, yaml.YAMLError, ValueError, RecursionError):
            settings = yaml.safe_load((self.path / files.CONFIG).read_text(encoding="utf-8"))
            if isinstance(settings, dict):
                if "model" in settings:  # of a run from before this setting
                    settings.setdefault("device", "auto")
                return settings
        raise ConfigError(f"{self.path} has no {files.CONFIG} with settings: give the folder of one run that has begun")

    def setting(self, key: str) -> Any:
        """Return one setting by its dotted name; None where the run has none of this name."""
        return setting_in(self.settings, key)

    def grading(self, evaluates: bool = False, of_set: str = "") -> tuple[str, str | None, dict[str, Any]]:
        """Return (reward, verifier of the data, group `grading`) of the run's responses, or of its evaluations'.

        `of_set`: one of `eval.sets`.
        """
        groups = (f"eval.sets.{of_set}", "eval") if evaluates else ()
        keys = [f"{group}.{name}" for name in ("reward", "prompt.reward") for group in groups]
        reward = next(filter(None, map(self.setting, [*keys, "prompt.reward"])), None)
        if not reward:
            raise ConfigError(f"{self.path} has no prompt.reward: give the folder of a run that grades responses")
        data = next((group for group in groups if self.setting(f"{group}.data")), "")
        return str(reward), self.setting(f"{data}.data.verifier".lstrip(".")), dict(self.setting("grading") or {})

    @property
    def status(self) -> str | None:
        """The run's status, one of `status.STATUSES`; None where it wrote none."""
        return read_status(self.path)

    @property
    def model(self) -> Path | None:
        """The folder of the saved model; None where there is none."""
        path = self.path / files.MODEL
        return path if path.is_dir() else None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` so far: flat, every value a number, or None where it was not finite."""
        return self._lines(files.METRICS)

    @cached_property
    def incidents(self) -> list[dict[str, Any]]:
        """The pairs of answer and ground truth on which grading failed, with the reasons."""
        return self._lines(files.INCIDENTS)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        return [row for _, row in each_line(path, self._say)] if path.is_file() else []

    def tail(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a log in the folder that are not blank; [] where there is none."""
        path = self.path / name
        if not path.is_file():
            return []
        text = path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        filled = [visible(line.strip()) for line in redacted(text).splitlines() if line.strip()]
        return [shorten(line, TAIL_CHARS) for line in filled[-lines:]]

    def rollouts(self) -> list[ResponseFile]:
        """Return the saved training steps, oldest first."""
        return response_files(self.path, files.ROLLOUTS)

    def evaluations(self, of_set: str = "") -> list[ResponseFile]:
        """Return the saved evaluations of a training run, oldest first; or those of one of `eval.sets`, of any run."""
        if not of_set:
            return response_files(self.path, files.EVALS)
        kind = f"{files.EVALS}/{of_set}"
        by_job = [self.path / kind / name for name in (files.RESPONSES, files.UNFINISHED)]
        return response_files(self.path, kind) or [ResponseFile(path, kind) for path in by_job if path.is_file()][:1]

    def responses(self, step: int | None = None, rollouts: bool = False, of_set: str = "") -> ResponseFile:
        """Return the responses of a job that does not train, or of a training run's last evaluation, or of `step`.

        `rollouts`: those that a training run learned from, not its evaluations. `of_set`: to one of `eval.sets`.
        """
        for name in (files.RESPONSES, files.UNFINISHED):
            if step is None and not (rollouts or of_set) and (path := self.path / name).is_file():
                return ResponseFile(path, files.RESPONSES)
        saved = [*([] if of_set else self.rollouts()), *([] if rollouts else self.evaluations(of_set))]
        if found := [file for file in saved if step is None or (file.step == step and file.update is None)]:
            return found[-1]
        if step is None or not saved:
            have = f" (sets: {few(names)})" if (names := files.sets_of(self.path)) else ""
            cure = "give a run's folder, with --step one that trains"
            raise ConfigError(f"{self.path} holds no such responses{have}: {cure}")
        steps = sorted({file.step or 0 for file in saved})
        raise ConfigError(f"--step {step}: {self.path} saved the steps {', '.join(map(str, steps))}: choose one")

    def rows(self, file: ResponseFile, needed: Sequence[str]) -> dict[int, Row]:
        """Return the responses of a file by line number, each with the needed fields."""
        return dict(each_line(file.path, self._say, needed))


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder by their dotted names; {} where there is none."""
    return flat(RunFolder(folder).settings) if (folder / files.CONFIG).is_file() else {}


#: Metrics that depend on time. Nothing else may differ between two runs of the same settings on the same machine.
CLOCK = re.compile(r"time/|busy/|perf/|memory/|grading/ms_|eval/tokens_per_second")


def compared(one: RunFolder, other: RunFolder) -> tuple[dict[str, bool | None], list[str]]:
    """Return of metrics, responses and weights whether both runs agree (None if one has none), and a sentence each."""
    equal, sentences, after = dict[str, bool | None](), list[str](), contents_of(other)
    for kind, then in contents_of(one).items():
        now = after[kind]
        different = [key for key in then | now if then.get(key, KeyError) != now.get(key, KeyError)]
        equal[kind] = not different if then and now else None
        if not then or not now:
            sentences.append(f"{kind}: one of the two has none")
        elif different:
            key = different[0]
            sentences.append(f"{kind} differ: {key} was {then.get(key)} then, {now.get(key)} now")
        else:
            sentences.append(f"{kind} are equal ({len(then)})")
    return equal, sentences


def contents_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return a run's metrics by row and name, and digests of its files of responses and weights."""
    metrics = dict[str, Any]()
    for number, row in enumerate(run.metrics, 1):
        metrics |= {f"row {number}'s {name}": value for name, value in without_clock(row).items()}
    of_sets = [file for name in files.sets_of(run.path) for file in run.evaluations(name)]
    saved = [file.path for file in [*run.rollouts(), *run.evaluations(), *of_sets]]
    saved += [run.path / files.RESPONSES] if (run.path / files.RESPONSES).is_file() else []
    weights = sorted(run.model.glob("*.safetensors")) if run.model else []
    return {
        "metrics": metrics,
        "responses": {str(path.relative_to(run.path)): digest(path)[:8] for path in saved},
        "weights": {path.name: digest(path)[:8] for path in weights},
    }


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without those that depend on time.

    >>> without_clock({"train/loss": 0.5, "time/total": 3.0, "grading/ms_p99": 1.0})
    {'train/loss': 0.5}
    """
    return {name: value for name, value in row.items() if not CLOCK.match(name)}
