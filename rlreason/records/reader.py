"""Read a run: the files of its folder, and its status (written here too), exit code and time."""

import errno
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlreason.errors import ConfigError, ResourceError, UnwritableError
from rlreason.records import files
from rlreason.records.files import STATUS, SUMMARY, ResponseFile, each_line
from rlreason.records.rows import NUMBER, Row, lacks
from rlreason.runtime.clock import GB, Clock
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import redacted, shorten, visible


class Ending(NamedTuple):
    """The meaning of a status. `of_its_own`: the run ended as its settings provide and left a `summary.json`."""

    meaning: str
    exit_code: int | None
    of_its_own: bool


STATUSES: dict[str, Ending] = {
    "running": Ending("under way, or killed without a chance to say so", None, False),
    "finished": Ending("all steps done", 0, True),
    "stopped": Ending("ended by a rule that was asked for, as stopped:RULE", 0, True),
    "budget": Ending("ended because its hours, tokens or steps were spent", 0, True),
    "diverged": Ending("the loss, the weights or the accuracy went astray, as diverged:RULE", 5, True),
    "interrupted": Ending("stopped by a signal", 130, False),
    "failed": Ending("anything else went wrong", 1, False),
}


RESOURCES = ResourceError.exit_code
SHORTAGES = ("can't allocate memory", "CUDA error: out of memory", "No space left on device")  # in libraries' errors
TAIL_BYTES, TAIL_CHARS = 16_384, 200  # of a log that are read, and of a line that are shown
PHASES_IN_LINE = 4


def ending(status: str) -> Ending:
    """Return the row of a status, whatever its rule.

    >>> ending("diverged:loss").exit_code, ending("finished").of_its_own
    (5, True)
    """
    return STATUSES[status.partition(":")[0]]


def known_status(status: str) -> str:
    """Return the status if it is in the table, else `failed`.

    >>> known_status("diverged:loss"), known_status("")
    ('diverged:loss', 'failed')
    """
    return status if status.partition(":")[0] in STATUSES else "failed"


def read_status(folder: Path) -> str | None:
    """Return the status in a run's `status.json`, else in its `summary.json`; None where neither can be read."""
    for name in (STATUS, SUMMARY):
        with suppress(OSError, ValueError, AttributeError):  # a file that is not there, or broken
            return known_status(str(json.loads((folder / name).read_text(encoding="utf-8")).get("status", "")))
    return None


def read_ending(folder: Path) -> dict[str, str]:
    """Return when and how the run ended: {"ended", "status", "reason"}; {} while it runs, or if it was killed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        if row["status"] != "running":
            return {"ended": str(row["time"]), "status": str(row["status"]), "reason": str(row["reason"])}
    return {}


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
    if isinstance(error, OSError):
        short = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    elif not short:
        short = any(text in str(error) for text in SHORTAGES)
    return RESOURCES if short else 1


def write_status(folder: Path, status: str, reason: str = "") -> None:
    """Replace `status.json`: {"status", "reason", "time"}."""
    assert ending(status)
    row = {"status": status, "reason": redacted(reason), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    path, text = folder / STATUS, json.dumps(row, indent=2) + "\n"
    try:
        write_whole(path, text)
    except UnwritableError:
        if not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:  # a full disk still has the space of the old one
            file.write(text)
            file.truncate()


def time_summary(clock: Clock) -> dict[str, Any]:
    """Return seconds, also of each phase, tokens per second and the peak of memory in GB, for `summary.json`."""
    return {
        "seconds": round(clock.total(), 1),
        "phases": {name: round(value, 3) for name, value in clock.phases().items()},
        **{name: round(value, 4) for name, value in clock.overall().items()},
        "peak_gb": round(clock.peak() / GB, 3),
    }


def time_line(summary: Mapping[str, Any]) -> str:
    """Return the same as a line; empty where the summary has none of it.

    >>> time_line({"phases": {"train": 6.0, "rollout": 3.0, "other": 1.0}, "peak_gb": 1.25,
    ...            "perf/train_tokens_per_second": 1200.0, "perf/train_mfu": 0.31})
    'time       train 60%, rollout 30%, other 10%; train 1200 tokens/s (31% of peak FLOPs); memory 1.2 GB'
    """
    phases: Mapping[str, float] = summary.get("phases", {})
    total = sum(phases.values())
    if not total:
        return ""
    longest = sorted(phases.items(), key=lambda item: -item[1])[:PHASES_IN_LINE]
    parts = ["time       " + ", ".join(f"{name} {value / total:.0%}" for name, value in longest)]
    for name in ("rollout", "train"):
        if (speed := summary.get(f"perf/{name}_tokens_per_second")) is not None:
            used = summary.get(f"perf/{name}_mfu")
            parts.append(f"{name} {speed:.0f} tokens/s" + (f" ({used:.0%} of peak FLOPs)" if used is not None else ""))
    return "; ".join([*parts, f"memory {summary['peak_gb']:.1f} GB"])


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
    """One run's folder; each of its files is read when it is needed.

    Raises `ConfigError` where there is no such folder.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print_stderr) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder: give the folder of a run, as printed at its start")
        self.path, self._say, self._messages = path, say, set[str]()

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """`provenance.json`: commit, command and versions; {} where there is none."""
        return self._object(files.PROVENANCE) or {}

    @cached_property
    def config(self) -> str:
        """The text of `config.yaml`. Raises `ConfigError` where there is none."""
        path = self.path / files.CONFIG
        if not path.is_file():
            raise ConfigError(f"{self.path} has no {files.CONFIG}: give the folder of one run that has begun")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({type(error).__name__}): give the folder of one run") from None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run with its value, from `config.yaml`."""
        try:
            settings = yaml.safe_load(self.config) or {}
        except (yaml.YAMLError, RecursionError) as error:
            settings = error
        if isinstance(settings, dict):
            return settings
        kind = type(settings).__name__
        raise ConfigError(f"{self.path / files.CONFIG} holds no settings ({kind}): give the folder of one run")

    def setting(self, key: str) -> Any:
        """Return one setting by its dotted name; None where the run has none of this name."""
        return setting_in(self.settings, key)

    def grading(self, evaluates: bool = False) -> tuple[str, str | None, dict[str, Any]]:
        """Return (reward, verifier of the data, group `grading`) of the run's responses, or of its evaluations'."""
        evaluates = evaluates and bool(self.setting("eval"))  # null there: as in training
        reward = self.setting("prompt.reward")
        if evaluates:
            reward = self.setting("eval.reward") or self.setting("eval.prompt.reward") or reward
        if not reward:
            raise ConfigError(
                f"{self.path / files.CONFIG} does not name the run's reward, prompt.reward: give the folder of one run"
            )
        data = "eval.data" if evaluates and self.setting("eval.data") else "data"
        grading = self.setting("grading") or {}
        if not isinstance(grading, dict):
            raise ConfigError(f"{self.path / files.CONFIG} has grading={grading!r}, which is no group: mend it")
        return str(reward), self.setting(f"{data}.verifier"), dict(grading)

    @property
    def status(self) -> str | None:
        """The run's status, one of `status.STATUSES`; None where it wrote none."""
        return read_status(self.path)

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """`summary.json`; None where the run did not end by itself."""
        return self._object(files.SUMMARY)

    @property
    def model(self) -> Path | None:
        """The folder of the saved model; None where there is none."""
        path = self.path / files.MODEL
        return path if path.is_dir() else None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` so far: flat, every value a number, or None where it was not finite."""

        def wrong(row: dict[str, Any]) -> str:
            odd = [name for name, value in row.items() if not (value is None or isinstance(value, NUMBER))]
            return f"no number in '{odd[0]}'" if odd else ""

        return self._lines(files.METRICS, wrong)

    @cached_property
    def incidents(self) -> list[dict[str, Any]]:
        """The pairs of answer and ground truth on which grading failed, with the reasons."""
        return self._lines(files.INCIDENTS, lambda row: "")

    def _lines(self, name: str, wrong: files.Checks) -> list[dict[str, Any]]:
        path = self.path / name
        return [row for _, row in each_line(path, wrong, self._say_once)] if path.is_file() else []

    def tail(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a log in the folder that are not blank; [] where there is none."""
        path = self.path / name
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        filled = [visible(line.strip()) for line in redacted(text).splitlines() if line.strip()]
        return [shorten(line, TAIL_CHARS) for line in filled[-lines:]]

    def rollouts(self) -> list[ResponseFile]:
        """Return the saved training steps, oldest first."""
        return files.response_files(self.path, files.ROLLOUTS)

    def evaluations(self) -> list[ResponseFile]:
        """Return the saved evaluations of a training run, oldest first."""
        return files.response_files(self.path, files.EVALS)

    def responses(self, step: int | None = None, rollouts: bool = False) -> ResponseFile:
        """Return the responses of a job that does not train, or of a training run's last evaluation, or of `step`.

        `rollouts`: those that a training run learned from, not its evaluations.
        """
        names = (files.RESPONSES, files.UNFINISHED)
        of_job = next((self.path / name for name in names if (self.path / name).is_file()), None)
        if of_job and not rollouts and step is None:
            return ResponseFile(of_job, files.RESPONSES)
        if of_job and step is not None:
            raise ConfigError(f"--step {step}: {self.path} is an evaluation, which has no steps: leave --step out")
        saved = [self.rollouts()] if rollouts else [self.evaluations(), self.rollouts()]
        for of_kind in saved:
            if found := [f for f in of_kind if step is None or (f.step == step and f.update is None)]:
                return found[-1]
        if steps := sorted({str(f.step) for of_kind in saved for f in of_kind if f.update is None}, key=int):
            raise ConfigError(f"--step {step}: {self.path} saved the steps {', '.join(steps)}: choose one of them")
        kinds = files.ROLLOUTS if rollouts else f"{files.EVALS}, {files.ROLLOUTS}"
        raise ConfigError(f"{self.path} holds no {kinds} or {files.RESPONSES}: give the folder of one run")

    def rows(self, file: ResponseFile, needed: Sequence[str]) -> dict[int, Row]:
        """Return the responses of a file by line number, each with the needed fields (`rows.FIELDS`)."""

        def wrong(row: Row) -> str:
            return "" if row.keys() == {"identity"} else lacks(row, needed)  # the head of an unfinished evaluation

        lines = each_line(file.path, wrong, self._say_once)
        return {number: row for number, row in lines if row.keys() != {"identity"}}

    def _object(self, name: str) -> dict[str, Any] | None:
        """Read a file with one JSON object; None where there is none, or where it is broken, which is reported."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            value = json.loads(path.read_bytes().decode())
        except (OSError, ValueError, RecursionError) as error:
            value = error
        if not isinstance(value, dict):
            self._say_once(f"{path} is left out: it is no JSON object ({type(value).__name__})")
            return None
        return value

    def _say_once(self, text: str) -> None:
        if text not in self._messages:
            self._messages.add(text)
            self._say(text)


def algorithm_of(folder: Path) -> str:
    """Return the algorithm of the run in a folder; "" where there is none."""
    return str(RunFolder(folder).settings.get("algorithm")) if (folder / files.CONFIG).is_file() else ""
