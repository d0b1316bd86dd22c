"""Run all monitors on a run, live or from its folder: count findings, warn, stop the run; the subcommand `health`."""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rlreason.config.groups import MODES, OF_JOBS, WEIGHTS, MonitorsConfig, limits_of, settings_of
from rlreason.grading.grader import COUNTED, WARN_SHARE
from rlreason.health.monitors import DIVERGES, MONITORS, RULES, Finding, Metrics, Observation, found
from rlreason.records.console import Console
from rlreason.records.files import ENGINE_LOG, LOG, METRICS, STACKS
from rlreason.records.reader import RunFolder, read_ending, runs_in, setting_in
from rlreason.runtime.files import holder
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import few, shorten

#: Metrics whose values the monitors keep, step by step.
REMEMBERED = (
    "train/grad_norm", "train/weights_changed", "train/learning_rate", "train/kl_reference", "train/approx_kl",
    "reward/frac_reward_zero_std", "reward/mean", "reward/min", "reward/max", "reward/format",
    "rollout/right", "rollout/length", "rollout/length_correct", "rollout/mismatch_mean",
    "eval/mismatch_mean", "eval/accuracy_low", "eval/accuracy_high", "eval/accuracy",
)  # fmt: skip
WINDOW = 200  # steps of a median; the first of the run is kept as well


@dataclass
class Monitors:
    """Checks every step; prints a new notice by `say`, and again at its 10th, 100th ... time; counts them all."""

    group_size: int
    say: Callable[[str], None]
    settings: MonitorsConfig = field(default_factory=MonitorsConfig)
    eval_limit: str = ""  # the setting that limits responses of evaluations, where it is not that of the rollouts
    steps: bool = True  # whether the run has any; a job that only evaluates has none
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, Any] = field(default_factory=dict)  # the finding that ends the run: see `_record`
    on_finding: Callable[[Finding], object] = lambda finding: None  # called with each

    def __post_init__(self) -> None:
        self.modes: dict[str, str] = {}  # monitor -> off, warn, stop; of a run without steps few are on
        for name in (*MONITORS, "grader"):
            self.modes[name] = getattr(self.settings, name) if self.steps or name in OF_JOBS else "off"
        self.history: dict[str, list[float]] = {name: [] for name in REMEMBERED}

    def check(
        self,
        step: int | None,
        metrics: Metrics,
        updates: Sequence[Metrics] = (),
        *,
        finite_weights: bool = True,
        evaluations: Sequence[Metrics] = (),
    ) -> None:
        """Check a step or an evaluation, then add the metrics to the history.

        `step`: None where there are no steps. `updates`: those of the step; none: the metrics are of its only update.
        `evaluations`: all so far, where one is to be compared.
        """
        seen = Observation(
            metrics, updates or [metrics], self.settings, self.history, finite_weights, self.group_size, evaluations,
            self.eval_limit,
        )  # fmt: skip
        numbers = seen.finite()  # only `nan` checks values that are not finite
        for name, look in MONITORS.items():
            on = self.modes[name] != "off" or (name == "nan" and not finite_weights)
            if on and (result := look(seen if name == "nan" else numbers)):
                self._record(step, name, found(name, result) if isinstance(result, dict) else result)
        for name, values in self.history.items():
            worst = numbers.worst(name)
            value = numbers.metrics.get(name) if worst is None else worst
            if value is not None:
                self.history[name] = [*values[:1], *[*values[1:], value][-WINDOW:]]

    def check_grades(self, step: int | None, warnings: Sequence[str], when: str = "") -> None:
        """Pass on the grader's warnings about a step or an evaluation."""
        if self.modes["grader"] != "off":
            for warning in warnings:
                self._record(step, "grader", found("grader", what=f"{when}{warning}"))

    def _record(self, step: int | None, name: str, finding: Finding) -> None:
        rule = finding.rule
        self.on_finding(replace(finding, step=step))
        self.warn(step, rule, finding.sentence)
        enough = finding.figures.get("steps", 1) >= getattr(self.settings, f"{name}_steps", 1)
        if rule == WEIGHTS or (self.modes[name] == "stop" and enough and not self.stopped):
            self.stopped = {
                "status": f"{'diverged' if name in DIVERGES else 'stopped'}:{rule}",
                "reason": f"{_at(step)}{finding.sentence}",
                "alarm": {"monitor": name, "rule": rule, "step": step, "numbers": finding.figures},
                "settings": self._settings(name),
            }

    def _settings(self, name: str) -> dict[str, Any]:
        return {key: getattr(self.settings, key) for key in (name, *limits_of(name))}

    def state_dict(self) -> dict[str, Any]:
        """Return counts, the stop and the history as plain values, for a checkpoint."""
        return {"counts": dict(self.counts), "stopped": dict(self.stopped), "history": dict(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. A stop by a monitor whose settings have changed is dropped."""
        self.counts, self.stopped = Counter(state["counts"]), dict(state["stopped"])
        self.history |= state["history"]
        alarm = self.alarm()
        if alarm and alarm["rule"] != WEIGHTS and self.stopped["settings"] != self._settings(alarm["monitor"]):
            self.stopped = {}

    def reason_to_stop(self) -> tuple[str, str] | None:
        """Return (status, reason) where a monitor ends the run, else None."""
        return (self.stopped["status"], self.stopped["reason"]) if self.stopped else None

    def alarm(self) -> dict[str, Any]:
        """Return monitor, rule, step and numbers of the stop, for the summary; {} where no monitor stopped the run."""
        alarm: dict[str, Any] = self.stopped.get("alarm", {})
        return alarm

    def warn(self, step: int | None, name: str, text: str) -> None:
        """Count a notice of this name, and print it the 1st, 10th, 100th ... time."""
        self.counts[name] += 1
        if str(self.counts[name]).strip("0") == "1":
            times = f" (seen {self.counts[name]} times)" if self.counts[name] > 1 else ""
            self.say(f"! {_at(step)}{text}{times}")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "


# ---- from rows ----

Row = Mapping[str, float | None]
LATE = 0.25  # of the rows: the end of a run
#: A note -> the rule of a monitor that replaces it.
REPLACED_BY = {"accuracy_fell": "accuracy", "few_live_groups": "no_live_group", "many_cut": "truncated"}
#: Rules that a sound run may meet now and then, as where a small batch is mastered: notes, if not ten times in a row.
PASSING = ("no_live_group", "identical_samples")


def _step(row: Row) -> int:
    return int(row.get("rollout_step") or 0)


def events_of(rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, float], list[dict[str, float]], bool]]:
    """Yield (step, metrics, updates, whether it is an evaluation) in the order in which steps and evaluations ended.

    A step ends with the last row of its number; its metrics are the means over its updates.
    """
    last = {_step(row): n for n, row in enumerate(rows) if "eval/accuracy" not in row}
    updates: list[dict[str, float]] = []
    for n, row in enumerate(rows):
        plain = {name: math.nan if value is None else value for name, value in row.items()}
        if "eval/accuracy" in row:
            yield _step(row), plain, [plain], True
            continue
        updates.append(plain)
        if last[_step(row)] == n:
            names = dict.fromkeys(name for update in updates for name in update)
            whole = {name: mean([update[name] for update in updates if name in update]) for name in names}
            yield _step(row), whole, updates, False
            updates = []


def monitored(rows: Sequence[Row], settings: Mapping[str, Any], status: str = "") -> list[Finding]:
    """Return the monitors' findings in the rows, each rule once, by its first step; the one that ended the run first.

    Every monitor warns, with the run's own thresholds; a rule that stopped the run does not stop the replay.
    """
    trained = any("eval/accuracy" not in row for row in rows)
    own_limit = setting_in(settings, "eval.sampling.max_tokens") is not None
    eval_limit = "eval.sampling.max_tokens" if own_limit else "" if trained else "sampling.max_tokens"
    compares = any("reward/frac_reward_zero_std" in row for row in rows)
    group_size = settings.get("group_size") or (8 if compares else 1)
    own = settings.get("monitors") or {}
    thresholds = {f.name: own[f.name] for f in fields(MonitorsConfig) if f.name in own}
    config = MonitorsConfig(**thresholds | dict.fromkeys(MODES, "warn"))
    if own.get("parity") == "correct":
        config.parity = "correct"
    by_rule: dict[str, list[Finding]] = defaultdict(list)
    monitors = Monitors(group_size, lambda line: None, config, eval_limit, steps=trained)
    monitors.on_finding = lambda finding: by_rule[finding.rule].append(finding)
    evaluations: list[dict[str, float]] = []
    for step, metrics, updates, evaluates in events_of(rows):
        final = {name.replace("final/", "eval/"): v for name, v in metrics.items() if name.startswith("final/")}
        monitors.check(step if trained else None, metrics | final, updates)
        if evaluates and trained:
            evaluations.append(metrics)
            monitors.check(step, {}, evaluations=evaluations)
    n_steps = len(set(map(_step, rows)))
    findings = [_summary(by_rule[rule], n_steps) for rule in by_rule]
    ended_by = status.partition(":")[2]
    return sorted(findings, key=lambda finding: finding.rule != ended_by)


def _summary(again: Sequence[Finding], n_steps: int) -> Finding:
    """Return the first finding of a rule with the steps of all of them as evidence."""
    first, last = again[0], again[-1]
    steps = list(dict.fromkeys(finding.step or 0 for finding in again))
    evidence = [f"first at step {steps[0]}, in {len(steps)} steps: {few(list(map(str, steps)))}"]
    if last.what != first.what:
        evidence.append(f"at step {steps[-1]}: {last.what}")
    is_long = any(step + 9 == later for step, later in zip(steps, steps[9:], strict=False))
    passing = first.rule in PASSING and not is_long and len(steps) < n_steps / 2
    return replace(first, problem=not passing, evidence=evidence, step=steps[0])


def lost_grades(rows: Sequence[Row], incidents: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each kind of failure of more than 0.5% of a step's or an evaluation's responses.

    `incidents`: the lines of grading_incidents.jsonl.
    """
    kinds = [(kind, text, f"grading/{kind}", "grading/responses") for kind, text in COUNTED.items()]
    kinds.append(("eval", "of evaluations got no grade", "eval/grading_failures", "eval/samples"))
    for kind, description, lost, graded in kinds:
        counts = [(_step(row), row.get(lost) or 0.0, of) for row in rows if (of := row.get(graded) or 0.0) > 0]
        steps = [step for step, n, of in counts if n > WARN_SHARE * of]
        if not steps:
            continue
        in_all, of_all = sum(n for _, n, _ in counts), sum(of for _, _, of in counts)
        share = f"{in_all:.0f} of {of_all:.0f} responses ({in_all / of_all:.1%})"
        what = f"{share} {description}; that says nothing about the model"
        reasons = Counter(str(row.get("error") or row.get("status")) for row in incidents).most_common(2)
        evidence = [f"first at step {steps[0]}, in {len(steps)} steps or evaluations"]
        evidence += [f"grading_incidents.jsonl, {count} times: {shorten(reason, 160)}" for reason, count in reasons]
        yield found(f"grader_{kind}", {"lost": in_all}, what, evidence=evidence, step=steps[0])


def notes_on_learning(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield notes on the end of the run: accuracy that fell, few live groups, many cut responses."""
    evaluated = [row for row in rows if row.get("eval/accuracy_high") is not None]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        if (last["eval/accuracy_high"] or 0.0) < (first.get("eval/accuracy_low") or 0.0):
            begin, end = (row.get("eval/accuracy") or 0.0 for row in (first, last))
            what = f"accuracy was {begin:.3f} at first and {end:.3f} at step {_step(last)}: surely lower"
            yield found("accuracy_fell", what=what, step=_step(last))
    dead, cut = mean_at_end(rows, "reward/frac_reward_zero_std"), mean_at_end(rows, "rollout/truncated")
    if dead is not None and 1 - dead < 0.3:
        what = f"only {1 - dead:.0%} of the groups held better and worse responses in the end: little signal a step"
        yield found("few_live_groups", what=what, problem=False)
    if cut is not None and cut > 0.1:
        what = f"{cut:.0%} of the responses were cut at their limit in the end"
        yield found("many_cut", what=what, problem=False)


def mean_at_end(rows: Sequence[Row], metric: str) -> float | None:
    """Return the mean of a metric over the last quarter of its rows; None where there are too few."""
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return mean(values[-max(1, int(LATE * len(values))) :]) if len(values) > 3 else None


def findings_of(
    rows: Sequence[Row], settings: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]] = (), status: str = ""
) -> list[Finding]:
    """Return all findings in the rows of a run: the monitors', lost grades, and how it learned."""
    findings = [*monitored(rows, settings, status), *lost_grades(rows, incidents)]
    rules = {finding.rule for finding in findings if finding.problem}
    return findings + [note for note in notes_on_learning(rows) if REPLACED_BY[note.rule] not in rules]


# ---- from a folder ----


def describe_state(folder: RunFolder, done: int, seen: Sequence[str]) -> tuple[str, list[Finding]]:
    """Return (the run's state in a sentence, the problems of that state).

    `done`: the steps in its metrics. `seen`: rules that they have broken, which need no second finding.
    """
    word, _, rule = (folder.status or "running").partition(":")
    state, reason = f"{word} by the rule {rule}" if rule else word, read_ending(folder.path).get("reason", "")
    logged = [f"{name}: {line}" for name in (LOG, ENGINE_LOG) for line in folder.tail(name, 4)]
    findings: list[Finding] = []
    if word == "running" and (by := holder(folder.path)):
        state = f"under way in {by}"
    elif word == "running":
        state = "broken off without a word"
        findings.append(found("killed", evidence=logged))
    elif word == "interrupted":
        findings.append(found(word, what=f"the run was interrupted {reason}".rstrip(), problem=False))
    elif word == "failed":
        words = next(key for key in RULES if key.startswith("failed: ") and key[8:] in reason.lower())
        what = f"the run failed: {reason or 'it does not say why'}"
        findings.append(found(word, what=what, words=words, evidence=logged))
    elif word in ("stopped", "diverged") and rule != "dominated" and rule not in seen:
        keys, causes = settings_of(rule), RULES.get(rule, {}).get("causes", "")
        cure = f"mend what it says; {f'resume=RUN {keys[0]}=warn goes on without it' if keys else 'start anew'}"
        what = f"a monitor ended the run: {reason or rule}"
        findings.append(Finding(f"ended:{rule}", what, cure, causes=causes))
    elif isinstance(taken := (folder.summary or {}).get("rollout_step"), int) and done < taken:
        what = f"its metrics end at step {done}, and it took {taken}: {METRICS} was cut, removed or replaced"
        findings.append(found("lost_metrics", what=what))
    if threads := [f"{STACKS}: {line}" for line in folder.tail(STACKS, 1)]:
        findings.append(found("hung", evidence=threads))
    return f"{state}, {done} steps done", findings


def examine(path: Path) -> tuple[str, list[Finding]]:
    """Return (the run's state in a sentence, its findings, problems first). `ConfigError` where it is no run folder."""
    broken: list[str] = []
    folder = RunFolder(path, broken.append)
    rows = folder.metrics
    findings = findings_of(rows, folder.settings, folder.incidents, folder.status or "")
    rules = [finding.rule for finding in findings]
    state, ended = describe_state(folder, max(map(_step, rows), default=0), rules)
    findings = ended + findings
    if broken:
        what = f"{len(broken)} of the folder's files or lines cannot be read"
        findings.append(found("broken_files", what=what, evidence=broken[:5]))
    return state, sorted(findings, key=lambda finding: not finding.problem)


def describe_health(name: str, state: str, findings: Sequence[Finding], width: int) -> str:
    """Format the examination of one run."""
    problems = sum(finding.problem for finding in findings)
    lines = [f"{name}: {state}. {problems or 'No'} problems found."]
    for finding in findings:
        lines += ["", f"{'!' if finding.problem else '-'} {finding.rule}: {finding.what}"]
        rows = [*(("evidence", line) for line in finding.evidence), ("causes", finding.causes), ("try", finding.cure)]
        lines += [f"  {title:<10}{line}" for title, line in rows if line]
    return "\n".join(folded(line, width, 2) for line in lines)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason health`."""
    parser.add_run("the folder of a run, or of a sweep: then of each of its runs", several=True)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Examine each run; the exit code is 1 where one has a problem."""
    texts, figures, ill = list[str](), list[dict[str, Any]](), 0
    for run in [run for folder in arguments.runs for run in runs_in(folder) or [folder]]:
        state, findings = examine(run)
        texts.append(describe_health(str(run), state, findings, console.width))
        healthy = not any(finding.problem for finding in findings)
        ill += not healthy
        figures.append({"run": str(run), "stands": state, "healthy": healthy, "findings": list(map(asdict, findings))})
    if len(figures) > 1:
        texts.append(f"{len(figures)} runs, {ill} of them with problems")
    return Answer("\n\n".join(texts), {"healthy": not ill, "runs": figures}, 1 if ill else 0)
