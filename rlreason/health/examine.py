"""Examine a run's folder as far as it can be read, whether the run has ended, goes on or was broken off."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.health.ending import ENDED, how_it_stands
from rlreason.health.finding import Course, Finding
from rlreason.health.grading import lost_grades
from rlreason.health.learning import notes_on_learning
from rlreason.monitors.replay import Replayed, Row, as_numbers, replayed, steps_done
from rlreason.monitors.table import MONITORS
from rlreason.records.files import CONFIG, HYDRA, METRICS, STATUS
from rlreason.records.reader import RunFolder, setting_in
from rlreason.records.status import how_it_ended
from rlreason.runtime.text import few, spans

#: What a sound run may show in a step now and then, as where everything in a small batch is mastered: then a note.
PASSING = ("no_live_group", "identical_samples")
IN_A_ROW = 10


class Health(NamedTuple):
    """What was found in a run's folder: how it stands in a sentence, and the findings, problems first."""

    stands: str
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong; notes aside."""
        return not any(finding.problem for finding in self.findings)


def examine(path: Path) -> Health:
    """Everything that is wrong with the run in this folder. `ConfigError` where it is no folder of a run."""
    broken: list[str] = []
    folder = RunFolder(path, broken.append)
    settings = _settings(folder, broken)
    rows = as_numbers(folder.metrics)
    stands, ended = how_it_stands(folder, steps_done(rows), settings)
    course = course_of(rows, settings, how_it_ended(path).get("status", ""))
    seen = {f"{ENDED}{finding.rule}" for finding in course}
    findings = [*(finding for finding in ended if finding.rule not in seen), *course]
    findings += lost_grades(rows, folder.incidents)
    findings += _noticed(folder, {finding.rule for finding in findings})
    findings += _broken(broken)
    findings += notes_on_learning(rows, known={finding.rule for finding in findings})
    if not (path / CONFIG).is_file():
        findings.append(
            Finding("no_settings", f"there is no {CONFIG}: the monitors used their defaults", problem=False)
        )
    return Health(stands, sorted(findings, key=lambda finding: not finding.problem))


def course_of(rows: Sequence[Row], settings: dict[str, Any], status: str = "") -> list[Finding]:
    """What the monitors see in the rows (`as_numbers`), each rule once; what the run ended by stands first."""
    own = settings.get("monitors") or {}
    group = settings.get("group_size")
    trained = any("eval/accuracy" not in row for row in rows)
    own_limit = setting_in(settings, "eval.sampling.max_tokens") is not None
    limit = "eval.sampling.max_tokens" if own_limit else "" if trained else "sampling.max_tokens"
    size = group if isinstance(group, int) else 8 if any("reward/frac_reward_zero_std" in row for row in rows) else 1
    found = replayed(rows, own if isinstance(own, dict) else {}, size, limit)
    word, _, rule = status.partition(":")
    after = rule if word == "diverged" else ""
    return [_finding(one, rows, after) for one in sorted(found, key=lambda one: one.rule != rule)]


def _finding(one: Replayed, rows: Sequence[Row], diverged: str) -> Finding:
    """`diverged`: the rule that the run diverged by, which other findings may follow from."""
    steps, monitor = one.steps, MONITORS[one.monitor]
    at = f"first at step {steps[0]}" if len(steps) > 1 else f"at step {steps[0]}"
    evidence = [f"{at}{f', in {len(steps)} steps: {few(spans(steps), 6)}' if len(steps) > 1 else ''}"]
    if len(steps) > 1 and one.last.text != one.first.text:
        evidence.append(f"at step {steps[-1]}: {one.last.text}")
    if diverged not in ("", one.rule):
        evidence.append(f"the run diverged ({diverged}): this may follow from it")
    courses = [course for name in monitor.shown if len((course := course_in(rows, name)).points) > 1]
    passing = one.rule in PASSING and one.longest < IN_A_ROW and len(steps) < one.of / 2
    return Finding(
        one.rule, one.first.text, evidence, monitor.causes, one.first.cure, not passing, steps[0], one.first.numbers,
        courses,
    )  # fmt: skip


def course_in(rows: Sequence[Row], metric: str) -> Course:
    """How a metric went in these rows."""
    points = [(int(row.get("rollout_step") or 0), row.get(metric)) for row in rows]
    return Course(metric, [(step, float(value)) for step, value in points if value is not None])


def _settings(folder: RunFolder, broken: list[str]) -> dict[str, Any]:
    try:
        return folder.settings
    except ConfigError as error:
        if (folder.path / CONFIG).is_file():
            broken.append(str(error).partition(": give")[0])
        elif not any((folder.path / name).exists() for name in (METRICS, STATUS, HYDRA)):
            raise
        return {}


def _noticed(folder: RunFolder, known: set[str]) -> Iterator[Finding]:
    """What the run said while it went on and its rows do not show; its summary counts it."""
    notices = (folder.summary or {}).get("notices")
    if isinstance(notices, dict) and (more := {k: v for k, v in notices.items() if k not in known}):
        counts = ", ".join(f"{name} x{times}" for name, times in more.items())
        yield Finding("noticed", f"the run itself said, on the terminal: {counts}", problem=False)


def _broken(lines: Sequence[str]) -> Iterator[Finding]:
    if lines:
        cure = "see whether the disk was full, or another program wrote there; what can be read was examined"
        yield Finding(
            "broken_files",
            f"{len(lines)} thing{'s' * (len(lines) > 1)} in the folder cannot be read",
            lines[:5],
            "",
            cure,
        )
