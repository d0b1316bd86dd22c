"""Run all monitors on a run, live or from its folder: count findings, warn, stop the run; the subcommand `health`."""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlreason.config.groups import MODES, NAMES, OF_JOBS, WEIGHTS, MonitorsConfig, limits_of, settings_of
from rlreason.grading.grader import COUNTED, WARN_SHARE
from rlreason.health.monitors import DIVERGES, MONITORS, RULES, Finding, Metrics, Observation, found
from rlreason.records.console import Console
from rlreason.records.files import ENGINE_LOG, LOG, METRICS, STACKS
from rlreason.records.reader import RunFolder, read_ending, runs_in, setting_in
from rlreason.runtime.files import holder
from rlreason.runtime.streams import Answer, Parser, folded, run_folder
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
    eval_limit: str = ""  # the setting that limits responses of evaluations
    steps: bool = True  # whether the run has any; a job that only evaluates has none
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, Any] = field(default_factory=dict)  # the finding that ends the run: see `_record`
    on_finding: Callable[[Finding], object] = lambda finding: None  # called with each
    history: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in REMEMBERED})

    def mode(self, monitor: str) -> str:
        """Return off, warn or stop; in a run without steps few are on."""
        return str(getattr(self.settings, monitor)) if self.steps or monitor in OF_JOBS else "off"

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
        updates = updates or [metrics]
        seen = Observation(metrics, updates, self.settings, self.history, self.group_size, evaluations, self.eval_limit)
        own, *of_updates = ({k: v for k, v in part.items() if math.isfinite(v)} for part in (metrics, *updates))
        numbers = replace(seen, metrics=own, updates=of_updates)  # only `nan` checks values that are not finite
        for name, look in MONITORS.items():
            result = look(seen if name == "nan" else numbers) if self.mode(name) != "off" else None
            if name == "nan" and not finite_weights:  # nothing can be sampled without
                result = found(WEIGHTS)
            if result:
                self._record(step, name, found(name, result) if isinstance(result, dict) else result)
        for name, values in self.history.items():
            worst = numbers.worst(name)
            value = numbers.metrics.get(name) if worst is None else worst
            if value is not None:
                self.history[name] = [*values[:1], *[*values[1:], value][-WINDOW:]]

    def check_grades(self, step: int | None, warnings: Sequence[str], when: str = "") -> None:
        """Pass on the grader's warnings about a step or an evaluation."""
        if self.mode("grader") != "off":
            for warning in warnings:
                self._record(step, "grader", found("grader", what=f"{when}{warning}"))

    def _record(self, step: int | None, name: str, finding: Finding) -> None:
        rule, sentence = finding.rule, f"{finding.what}; {finding.cure}" if finding.cure else finding.what
        self.on_finding(replace(finding, step=step))
        self.warn(step, rule, sentence)
        enough = finding.figures.get("steps", 1) >= getattr(self.settings, f"{name}_steps", 1)
        if rule == WEIGHTS or (self.mode(name) == "stop" and enough and not self.stopped):
            self.stopped = {
                "status": f"{'diverged' if name in DIVERGES else 'stopped'}:{rule}",
                "reason": f"{_at(step)}{sentence}",
                "alarm": {"monitor": name, "rule": rule, "step": step, "numbers": finding.figures},
                "settings": {key: getattr(self.settings, key) for key in (name, *limits_of(name))},
            }

    def state_dict(self) -> dict[str, Any]:
        """Return counts, the stop and the history as plain values, for a checkpoint."""
        return {"counts": dict(self.counts), "stopped": dict(self.stopped), "history": dict(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. A stop by a monitor whose settings have changed is dropped."""
        self.counts, self.stopped = Counter(state["counts"]), state["stopped"]
        self.history |= state["history"]
        before = self.stopped.get("settings", {})
        if any(getattr(self.settings, key) != value for key, value in before.items()):
            self.stopped = {}

    def reason_to_stop(self) -> tuple[str, str] | None:
        """Return (status, reason) where a monitor ends the run, else None."""
        return (self.stopped["status"], self.stopped["reason"]) if self.stopped else None

    def warn(self, step: int | None, name: str, text: str) -> None:
        """Count a notice of this name, and print it the 1st, 10th, 100th ... time."""
        self.counts[name] += 1
        count = self.counts[name]
        if str(count).strip("0") == "1":
            times = f" (seen {count} times)" if count > 1 else ""
            self.say(f"! {_at(step)}{text}{times}")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "


# ---- from rows ----

Row = Mapping[str, Any]
#: Note, metric, the share that is too much in the last quarter of the rows, and the monitor that has noticed it itself.
NOTES = (
    ("few_live_groups", "reward/frac_reward_zero_std", 0.7, "no_live_group"),
    ("many_cut", "rollout/truncated", 0.1, "truncated"),
)
#: Rules that a sound run may meet now and then, as where a small batch is mastered: notes, if not ten times in a row.
PASSING = ("no_live_group", "identical_samples")


def _step(row: Row) -> int:
    return int(row.get("rollout_step") or 0)


def monitored(rows: Sequence[Row], settings: Mapping[str, Any], status: str = "") -> list[Finding]:
    """Return the monitors' findings in the rows, each rule once, by its first step; the one that ended the run first.

    Every monitor warns, with the run's own thresholds; a rule that stopped the run does not stop the replay. A step
    ends with the last row of its number; its metrics are the means over its updates.
    """
    last = {_step(row): n for n, row in enumerate(rows) if "eval/accuracy" not in row}
    own_limit = setting_in(settings, "eval.sampling.max_tokens") is not None
    eval_limit = "eval.sampling.max_tokens" if own_limit else "sampling.max_tokens"
    own = settings.get("monitors") or {}
    thresholds = {name: own[name] for name in NAMES if name in own}
    config = MonitorsConfig(**thresholds | dict.fromkeys(MODES, "warn"))
    monitors = Monitors(settings.get("group_size") or 1, lambda line: None, config, eval_limit, steps=bool(last))
    by_rule = defaultdict[str, list[Finding]](list)
    monitors.on_finding = lambda finding: by_rule[finding.rule].append(finding)
    evaluations, updates = list[Metrics](), list[Metrics]()
    for n, row in enumerate(rows):
        metrics = {name: math.nan if value is None else value for name, value in row.items()}
        compared: Sequence[Metrics] = ()
        if "eval/accuracy" in row:
            evaluations.append(metrics)
            compared = evaluations if last else ()
        else:
            updates.append(metrics)
            if last[_step(row)] != n:
                continue
            names = dict.fromkeys(name for update in updates for name in update)
            metrics = {name: fmean(update[name] for update in updates if name in update) for name in names}
        final = {name.replace("final/", "eval/"): v for name, v in metrics.items() if name.startswith("final/")}
        monitors.check(_step(row) if last else None, metrics | final, updates, evaluations=compared)
        updates = []
    n_steps, ended_by, findings = len(set(map(_step, rows))), status.partition(":")[2], list[Finding]()
    for of_rule in by_rule.values():
        first, steps = of_rule[0], list(dict.fromkeys(finding.step or 0 for finding in of_rule))
        evidence = [f"first at step {steps[0]}, in {len(steps)} steps: {few(list(map(str, steps)))}"]
        is_long = any(step + 9 == later for step, later in zip(steps, steps[9:], strict=False))
        passing = first.rule in PASSING and not is_long and len(steps) < n_steps / 2
        findings.append(replace(first, problem=not passing, evidence=evidence, step=steps[0]))
    return sorted(findings, key=lambda finding: finding.rule != ended_by)


def findings_of(
    rows: Sequence[Row], settings: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]] = (), status: str = ""
) -> list[Finding]:
    """Return all findings in the rows of a run: the monitors', lost grades, and notes on how it ended.

    Grades are lost where the grader failed on more than 0.5% of a step's or an evaluation's responses; `incidents` are
    the lines of grading_incidents.jsonl. The notes are of accuracy that fell, few live groups and many cut responses,
    where no monitor has found that.
    """
    findings = monitored(rows, settings, status)
    rules = {finding.rule for finding in findings if finding.problem}
    kinds = [
        *((kind, text, f"grading/{kind}", "grading/responses") for kind, text in COUNTED.items()),
        ("eval", "of evaluations got no grade", "eval/grading_failures", "eval/samples"),
    ]
    reasons = Counter(str(row.get("error") or row.get("status")) for row in incidents).most_common(2)
    for kind, description, lost, graded in kinds:
        counts = [(_step(row), row.get(lost) or 0.0, row[graded]) for row in rows if row.get(graded)]
        steps = [step for step, n, of in counts if n > WARN_SHARE * of]
        if not steps:
            continue
        in_all, of_all = sum(n for _, n, _ in counts), sum(of for _, _, of in counts)
        share = f"{in_all:.0f} of {of_all:.0f} responses ({in_all / of_all:.1%})"
        what = f"{share} {description}; that says nothing about the model"
        evidence = [f"first at step {steps[0]}, in {len(steps)} steps or evaluations"]
        evidence += [f"grading_incidents.jsonl, {count} times: {shorten(reason, 160)}" for reason, count in reasons]
        findings.append(found(f"grader_{kind}", {"lost": in_all}, what, evidence=evidence, step=steps[0]))
    evaluated = [row for row in rows if row.get("eval/accuracy_high") is not None]
    if evaluated and "accuracy" not in rules:
        first, last = evaluated[0], evaluated[-1]
        if last["eval/accuracy_high"] < first["eval/accuracy_low"]:
            figures = {"first": first["eval/accuracy"], "last": last["eval/accuracy"]}
            findings.append(found("accuracy_fell", figures, step=_step(last)))
    for note, metric, most, monitor in NOTES:
        values = [value for row in rows if (value := row.get(metric)) is not None]
        at_end = fmean(values[-(len(values) // 4) :]) if len(values) > 3 else 0.0
        if at_end > most and monitor not in rules:
            findings.append(found(note, {"share": at_end}, problem=False))
    return findings


# ---- from a folder ----


def examine(path: Path) -> tuple[str, list[Finding]]:
    """Return (the run's state in a sentence, its findings, problems first). `ConfigError` where it is no run folder."""
    broken: list[str] = []
    folder = RunFolder(path, broken.append)
    rows, status = folder.metrics, folder.status or "running"
    findings = findings_of(rows, folder.settings, folder.incidents, status)
    ended: list[Finding] = []
    done, rules = max(map(_step, rows), default=0), [finding.rule for finding in findings]
    word, _, rule = status.partition(":")
    state, reason = f"{word} by the rule {rule}" if rule else word, read_ending(path).get("reason", "")
    logged = [f"{name}: {line}" for name in (LOG, ENGINE_LOG) for line in folder.tail(name, 4)]
    if word == "running" and (by := holder(path)):
        state = f"under way in {by}"
    elif word == "running":
        state = "broken off without a word"
        ended.append(found("killed", evidence=logged))
    elif word == "interrupted":
        ended.append(found(word, what=f"the run was interrupted {reason}".rstrip(), problem=False))
    elif word == "failed":
        entry = next(key for key in RULES if key.startswith("failed: ") and key[8:] in reason.lower())
        what = f"the run failed: {reason or 'it does not say why'}"
        ended.append(found(entry, what=what, evidence=logged))
    elif word in ("stopped", "diverged") and rule != "dominated" and rule not in rules:  # which need no second finding
        keys, causes = settings_of(rule), RULES.get(rule, {}).get("causes", "")
        cure = f"mend what it says; {f'resume=RUN {keys[0]}=warn goes on without it' if keys else 'start anew'}"
        what = f"a monitor ended the run: {reason or rule}"
        ended.append(Finding(f"ended:{rule}", what, cure, causes=causes))
    elif done < (taken := (folder.summary or {}).get("rollout_step") or 0):
        what = f"its metrics end at step {done}, and it took {taken}: {METRICS} was cut, removed or replaced"
        ended.append(found("lost_metrics", what=what))
    if threads := [f"{STACKS}: {line}" for line in folder.tail(STACKS, 1)]:
        ended.append(found("hung", evidence=threads))
    if broken:
        what = f"{len(broken)} of the folder's files or lines cannot be read"
        findings.append(found("broken_files", what=what, evidence=broken[:5]))
    return f"{state}, {done} steps done", sorted(ended + findings, key=lambda finding: not finding.problem)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason health`."""
    help = "the folder of a run, or of a sweep: then of each of its runs"
    parser.add_argument("runs", metavar="RUN", type=run_folder, nargs="+", help=help)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Examine each run; the exit code is 1 where one has a problem."""
    lines, figures = list[str](), list[dict[str, Any]]()
    for run in [run for folder in arguments.runs for run in runs_in(folder) or [folder]]:
        state, findings = examine(run)
        problems = sum(finding.problem for finding in findings)
        lines.append(f"{run}: {state}. {problems or 'No'} problems found.")
        for finding in findings:
            lines += ["", f"{'!' if finding.problem else '-'} {finding.rule}: {finding.what}"]
            more = [("evidence", line) for line in finding.evidence]
            more += [("causes", finding.causes), ("try", finding.cure)]
            lines += [f"  {title:<10}{line}" for title, line in more if line]
        lines.append("")
        figures.append({
            "run": str(run), "stands": state, "healthy": not problems, "findings": list(map(asdict, findings)),
        })  # fmt: skip
    ill = sum(not run["healthy"] for run in figures)
    if len(figures) > 1:
        lines.append(f"{len(figures)} runs, {ill} of them with problems")
    text = "\n".join(folded(line, console.width, 2) for line in lines).rstrip()
    return Answer(text, {"healthy": not ill, "runs": figures}, 1 if ill else 0)
