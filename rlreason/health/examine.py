"""Examine a run's folder, whether the run has ended, still runs or was killed: its end, and what it learned."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rlreason.config.groups import settings_of
from rlreason.errors import ConfigError
from rlreason.grading.grader import COUNTED, WARN_SHARE
from rlreason.health.finding import RULES, Finding, found
from rlreason.health.watch import Row, as_numbers, replay_monitors
from rlreason.records.console import Console
from rlreason.records.files import CONFIG, ENGINE_LOG, LOG, METRICS, STACKS, STATUS
from rlreason.records.reader import RunFolder, read_ending, runs_in, setting_in
from rlreason.runtime.files import holder
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import few, shorten

ENDED = "ended:"  # and the rule: an end that the replay does not find, as of an evaluation that was not recorded
LATE = 0.25  # of the rows: the end of a run
#: A note -> the rule of a monitor that replaces it.
REPLACED_BY = {"accuracy_fell": "accuracy", "few_live_groups": "no_live_group", "many_cut": "truncated"}
#: Rules that a sound run may meet now and then, as where a small batch is mastered: notes, if not ten times in a row.
PASSING = ("no_live_group", "identical_samples")


def describe_state(folder: RunFolder, done: int, settings: dict[str, Any]) -> tuple[str, list[Finding]]:
    """Return (the run's state in a sentence, the problems of that state). `done`: the steps in its metrics."""
    status, planned = folder.status, settings.get("n_steps") or settings.get("n_ei_steps")
    of = f" of {planned}" if isinstance(planned, int) else ""
    reached = f", {done}{of} steps done" if of or done else ""
    threads = [f"{STACKS}: {line}" for line in folder.tail(STACKS, 1)]
    what = "the run was ended once because it gave no sign of life within waits.run_s"
    hung = [found("hung", what, evidence=threads)] if threads else []
    word, _, rule = (status or "running").partition(":")
    early = "" if folder.metrics else f"{word.replace('running', 'killed')} before its first step"
    reason = read_ending(folder.path).get("reason", "")
    logged = [f"{name}: {line}" for name in (LOG, ENGINE_LOG) for line in folder.tail(name, 4)]
    ends: list[Finding] = []
    if word == "running":
        if by := holder(folder.path):
            return f"under way in {by}{reached}", hung
        if status is None and not (folder.path / CONFIG).exists():
            return f"a copy of its metrics, which does not say how it ended{reached}", []
        left = "its status still says running, and no process writes there" if status else "it left no status"
        killed = found("killed", f"the run was killed: {left}", words=early, evidence=logged)
        return f"broken off without a word{reached}", [killed, *hung]
    if word == "interrupted":
        ends = [found(word, f"the run was interrupted {reason}".rstrip(), words=early, problem=False)]
    elif word == "failed":
        words = next(key for key in RULES if key.startswith("failed: ") and key[8:] in reason.lower())
        ends = [found(word, f"the run failed: {reason or 'it does not say why'}", words=words, evidence=logged)]
    elif word in ("stopped", "diverged") and rule != "dominated":
        keys, causes = settings_of(rule), RULES.get(rule, {}).get("causes", "")
        cure = f"mend what it says; {f'resume=RUN {keys[0]}=warn goes on without it' if keys else 'start anew'}"
        ends, hung = [Finding(f"{ENDED}{rule}", f"a monitor ended the run: {reason or rule}", cure, causes=causes)], []
    elif isinstance(taken := (folder.summary or {}).get("rollout_step"), int) and done < taken:
        what = f"its metrics end at step {done}, and it took {taken}: {METRICS} was cut, removed or replaced"
        ends = [found("lost_metrics", what)]
    return f"{word}{f' by the rule {rule}' if rule else ''}{reached}", [*ends, *hung]


def lost_grades(rows: Sequence[Row], incidents: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each kind of failure of more than 0.5% of a step's or an evaluation's responses.

    `incidents`: the lines of grading_incidents.jsonl.
    """
    kinds = [(kind, text, f"grading/{kind}", "grading/responses") for kind, text in COUNTED.items()]
    kinds.append(("eval", "of evaluations got no grade", "eval/grading_failures", "eval/samples"))
    for kind, description, lost, graded in kinds:
        counts = [(_step(row), row.get(lost) or 0.0, of) for row in rows if (of := row.get(graded))]
        steps = [step for step, n, of in counts if n > WARN_SHARE * of]
        if not steps:
            continue
        in_all, of_all = sum(n for _, n, _ in counts), sum(of for _, _, of in counts)
        share = in_all / of_all if of_all > 0 else 1.0
        what = f"{in_all:.0f} of {of_all:.0f} responses ({share:.1%}) {description}; that says nothing about the model"
        reasons = Counter(str(row.get("error") or row.get("status")) for row in incidents).most_common(2)
        evidence = [f"first at step {steps[0]}, in {len(steps)} steps or evaluations"]
        evidence += [f"grading_incidents.jsonl, {count} times: {shorten(reason, 160)}" for reason, count in reasons]
        yield found(f"grader_{kind}", what, {"lost": in_all}, evidence=evidence, step=steps[0])


def _step(row: Row) -> int:
    return int(row.get("rollout_step") or 0)


def notes_on_learning(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield notes on the end of the run: accuracy that fell or did not move, few live groups, many cut responses."""
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    names = [f"eval/accuracy{end}" for end in ("", "_low", "_high")]
    ends = [value for row in (*evaluated[:1], *evaluated[1:][-1:]) for n in names if (value := row.get(n)) is not None]
    if len(ends) == 6:
        begin, begin_low, begin_high, end, end_low, end_high = ends
        step = _step(evaluated[-1])
        change = f"accuracy was {begin:.3f} at first and {end:.3f} at step {step}"
        if end_high < begin_low:
            yield found("accuracy_fell", f"{change}: surely lower", step=step)
        elif end_low <= begin_high:
            what = f"{change}: by these problems nobody can tell whether it learned"
            yield found("accuracy_did_not_move", what, problem=False, step=step)
    dead, cut = mean_at_end(rows, "reward/frac_reward_zero_std"), mean_at_end(rows, "rollout/truncated")
    if dead is not None and 1 - dead < 0.3:
        what = f"only {1 - dead:.0%} of the groups held better and worse responses in the end: little signal a step"
        yield found("few_live_groups", what, problem=False)
    if cut is not None and cut > 0.1:
        what = f"{cut:.0%} of the responses were cut at their limit in the end"
        yield found("many_cut", what, problem=False)


def mean_at_end(rows: Sequence[Row], metric: str) -> float | None:
    """Return the mean of a metric over the last quarter of its rows; None where there are too few."""
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return mean(values[-max(1, int(LATE * len(values))) :]) if len(values) > 3 else None


def examine(path: Path) -> tuple[str, list[Finding]]:
    """Return (the run's state in a sentence, its findings, problems first). `ConfigError` where it is no run folder."""
    broken: list[str] = []
    folder, settings = RunFolder(path, broken.append), dict[str, Any]()
    try:
        settings = folder.settings
    except ConfigError as error:
        if (path / CONFIG).is_file():
            broken.append(str(error).partition(": give")[0])
        elif not any((path / name).exists() for name in (METRICS, STATUS)):
            raise
    rows = as_numbers(folder.metrics)
    state, ended = describe_state(folder, max(map(_step, rows), default=0), settings)
    replayed = findings_of(rows, settings, folder.incidents, read_ending(path).get("status", ""))
    seen = {f"{ENDED}{finding.rule}" for finding in replayed}
    findings = [*(finding for finding in ended if finding.rule not in seen), *replayed]
    rules, notices = {finding.rule for finding in findings}, (folder.summary or {}).get("notices")
    if isinstance(notices, dict) and (more := {k: v for k, v in notices.items() if k not in rules}):
        counts = ", ".join(f"{name} x{times}" for name, times in more.items())
        findings.append(found("noticed", f"the run itself said, on the terminal: {counts}", problem=False))
    if broken:
        what = f"{len(broken)} of the folder's files or lines cannot be read"
        findings.append(found("broken_files", what, evidence=broken[:5]))
    if not (path / CONFIG).is_file():
        what = f"there is no {CONFIG}: the monitors used their defaults"
        findings.append(found("no_settings", what, problem=False))
    return state, sorted(findings, key=lambda finding: not finding.problem)


def findings_of(
    rows: Sequence[Row], settings: dict[str, Any], incidents: Sequence[Mapping[str, Any]] = (), status: str = ""
) -> list[Finding]:
    """Return all findings in the rows of a run (`as_numbers`): the monitors', lost grades, and how it learned."""
    findings = [*monitored(rows, settings, status), *lost_grades(rows, incidents)]
    rules = {finding.rule for finding in findings if finding.problem}
    return findings + [note for note in notes_on_learning(rows) if REPLACED_BY.get(note.rule) not in rules]


def monitored(rows: Sequence[Row], settings: dict[str, Any], status: str = "") -> list[Finding]:
    """Return the monitors' findings in the rows (`as_numbers`), each rule once, the one that ended the run first."""
    own, group = settings.get("monitors"), settings.get("group_size")
    trained = any("eval/accuracy" not in row for row in rows)
    own_limit = setting_in(settings, "eval.sampling.max_tokens") is not None
    limit = "eval.sampling.max_tokens" if own_limit else "" if trained else "sampling.max_tokens"
    size = group if isinstance(group, int) else 8 if any("reward/frac_reward_zero_std" in row for row in rows) else 1
    word, _, ended_by = status.partition(":")
    n_steps = len(set(map(_step, rows)))
    findings = []
    for again in replay_monitors(rows, own if isinstance(own, dict) else {}, size, limit):
        first, last = again[0], again[-1]
        steps = list(dict.fromkeys(finding.step or 0 for finding in again))
        evidence = [f"at step {steps[0]}"]
        if len(steps) > 1:
            evidence = [f"first at step {steps[0]}, in {len(steps)} steps: {few(list(map(str, steps)))}"]
            if last.what != first.what:
                evidence.append(f"at step {steps[-1]}: {last.what}")
        if word == "diverged" and first.rule != ended_by:
            evidence.append(f"the run diverged ({ended_by}): this may follow from it")
        is_long = any(step + 9 == later for step, later in zip(steps, steps[9:], strict=False))
        passing = first.rule in PASSING and not is_long and len(steps) < n_steps / 2
        findings.append(replace(first, problem=not passing, evidence=evidence, step=steps[0]))
    return sorted(findings, key=lambda finding: finding.rule != ended_by)


def describe_health(name: str, state: str, findings: Sequence[Finding], width: int) -> str:
    """Format the examination of one run."""
    problems = [finding for finding in findings if finding.problem]
    verdict = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "No problem found"
    begun = [finding for finding in problems if finding.step is not None]
    if len(begun) > 1:  # the others may follow from it
        first = min(begun, key=lambda finding: finding.step or 0)
        verdict += f"; what began first is {first.rule}, at step {first.step}"
    lines = [f"{name}: {state}. {verdict}."]
    for finding in findings:
        lines += ["", f"{'!' if finding.problem else '-'} {finding.rule}: {finding.what}"]
        titles = ["evidence", *[""] * len(finding.evidence[1:])]
        rows = [*zip(titles, finding.evidence, strict=False), ("causes", finding.causes), ("try", finding.cure)]
        lines += [f"  {title:<10}{line}" for title, line in rows if line]
    return "\n".join(folded(line, width, 2) for line in lines)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason health`."""
    parser.add_run("the folder of a run, or of a sweep: then of each of its runs", several=True)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Examine each run; the exit code is 1 where one has a problem."""
    texts, unread, figures, runs = list[str](), list[str](), list[dict[str, Any]](), dict[Path, None]()
    for folder in arguments.runs:  # of a sweep its runs, also those without settings
        of_sweep = runs_in(folder)
        inner = {*of_sweep, *(path.parent for path in folder.glob(f"*/{STATUS}"))} if of_sweep else [folder]
        runs |= dict.fromkeys(sorted(inner))
    for run in runs:
        try:
            state, findings = examine(run)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            unread.append(str(error))
            continue
        texts.append(describe_health(str(run), state, findings, console.width))
        healthy = not any(finding.problem for finding in findings)
        listed = [asdict(finding) for finding in findings]
        figures.append({"run": str(run), "stands": state, "healthy": healthy, "findings": listed})
    texts += [f"! not read: {line}" for line in unread]
    ill = sum(not one["healthy"] for one in figures)
    if len(runs) > 1:
        texts.append(
            f"{len(figures)} runs, {ill} of them with problems" + (f"; {len(unread)} not read" if unread else "")
        )
    well = not ill and not unread
    return Answer("\n\n".join(texts), {"healthy": well, "runs": figures, "not_read": unread}, 0 if well else 1)
