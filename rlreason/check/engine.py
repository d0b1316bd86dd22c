"""One function tried on all its cases: what differs from ours, which known mistake explains it, on which inputs."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from torch import Tensor

from rlreason.check.calling import Yours
from rlreason.check.compare import clearly_apart, first_difference, is_wild, multiple, places
from rlreason.check.shrink import shrunk
from rlreason.check.subject import Case, Fault, Finding, Kind, Knobs, Seen, Subject
from rlreason.check.words import shown, shown_inputs


class Budget:
    """Seconds for looking for two mistakes that explain a difference together, over all functions of a module."""

    def __init__(self, seconds: float = 4.0, at_once: float = 1.5) -> None:
        self.left, self.at_once = seconds, at_once

    def spend(self, tries: Iterator[Knobs], fits: Callable[[Knobs], bool]) -> Knobs | None:
        """The first that fits before the time is up."""
        began = time.monotonic()
        try:
            for knobs in tries:
                if fits(knobs):
                    return knobs
                if time.monotonic() - began > min(self.left, self.at_once):
                    break
        finally:
            self.left -= time.monotonic() - began
        return None


def examine(subject: Subject, yours: Yours, budget: Budget | None = None) -> list[Finding]:
    """The bugs found in the user's function; empty where it does on every trial what ours does."""
    budget = budget or Budget()
    try:
        yours.fits()
    except Fault as fault:
        return [Finding(subject.name, *fault.kind, yours=fault.yours)]
    findings: list[Finding] = []
    all_cases = subject.cases()
    branches = list(dict.fromkeys(case.branch for case in all_cases))
    for branch in branches:
        cases = [case for case in all_cases if case.branch == branch]
        for finding in _of_branch(subject, yours, cases, branch in subject.optional, budget):
            if finding.kind not in {known.kind for known in findings}:
                findings.append(finding)
    if not findings:
        for tried in subject.properties:
            findings += list(tried(yours))
    return findings


class _Trial:
    """A case with what ours gives and what the user's gives: an observation, or the fault."""

    def __init__(self, subject: Subject, yours: Yours, case: Case) -> None:
        self.case = case
        self.ours = subject.observe(subject.ours, case.inputs)
        self.fault: Fault | None = None
        self.yours: Seen = {}
        try:
            self.yours = subject.observe(yours, case.inputs)
        except Fault as fault:
            self.fault = fault
        self.differs = self.fault is not None or (
            first_difference(self.yours, self.ours) is not None and not subject.alike(self.yours, case.inputs)
        )


def _of_branch(
    subject: Subject, yours: Yours, cases: Sequence[Case], optional: bool, budget: Budget
) -> Iterator[Finding]:
    """The bugs that the cases of one branch show; none where the branch is optional and not there."""
    trials = []
    for case in cases:
        trials.append(_Trial(subject, yours, case))
        if trials[-1].fault is not None and optional:
            return
    bad = [trial for trial in trials if trial.differs]
    if not bad:
        return
    comparable = [trial for trial in trials if trial.fault is None]
    differing = [trial for trial in comparable if trial.differs]
    if differing:
        yield from _explained(subject, yours, comparable, differing, budget)
    faulty = next((trial for trial in bad if trial.fault), None)
    if faulty and (not differing or len(faulty.case.about) > 0):
        yield _of_fault(subject, yours, faulty, all(trial.fault for trial in trials))


def _explained(
    subject: Subject, yours: Yours, comparable: list[_Trial], differing: list[_Trial], budget: Budget
) -> Iterator[Finding]:
    """The known mistakes that give what the user's gives on every trial; else what the difference looks like."""
    found = _matching(subject, sorted(comparable, key=lambda trial: not trial.differs), budget)
    if found:
        for knob, value in found.items():
            kind, alone = subject.knobs[knob][value], {knob: value}
            showing = next((t for t in differing if not _reproduces(subject, t.case, t.ours, {})), differing[0])
            for trial in differing:  # the first in which this mistake shows by itself
                if not _reproduces(subject, trial.case, trial.ours, alone):
                    showing = trial
                    break
            yield _example(subject, yours, showing, kind, found)
        return
    for hint in subject.hints:
        try:
            kind_or_none = hint(yours)
        except Exception:  # the function may refuse what a hint tries, or answer with other shapes
            continue
        if kind_or_none is not None:
            yield _example(subject, yours, differing[0], kind_or_none, None)
            return
    yield _example(subject, yours, differing[0], _generic(subject, differing), None)


def _matching(subject: Subject, trials: list[_Trial], budget: Budget) -> Knobs | None:
    if subject.wrong is None:
        return None
    singles = [(knob, value) for knob, values in subject.knobs.items() for value in values]
    for knob, value in singles:
        if all(_reproduces(subject, t.case, t.yours, {knob: value}) for t in trials):
            return {knob: value}
    pairs = (dict([a, b]) for a, b in combinations(singles, 2) if a[0] != b[0])
    return budget.spend(pairs, lambda knobs: all(_reproduces(subject, t.case, t.yours, knobs) for t in trials))


def _reproduces(subject: Subject, case: Case, seen: Seen, knobs: Knobs) -> bool:
    """Whether the function with these mistakes in it gives what was seen."""
    assert subject.wrong is not None
    try:
        guess = subject.observe(subject.wrong(knobs), case.inputs)
    except Exception:  # a mistake may make nonsense of some case
        return False
    return guess.keys() == seen.keys() and first_difference(guess, seen) is None


def _example(subject: Subject, yours: Yours, trial: _Trial, kind: Kind, knobs: Knobs | None) -> Finding:
    """The finding with the smallest inputs on which it still shows."""

    def still(case: Case) -> tuple[Seen, Seen] | None:
        try:
            ours, got = subject.observe(subject.ours, case.inputs), subject.observe(yours, case.inputs)
        except Fault:
            return None
        if not clearly_apart(got, ours) or subject.alike(got, case.inputs) or (not _is_like(got, trial.yours)):
            return None
        if any(is_wild(value) for value in ours.values()) and not any(is_wild(v) for v in trial.ours.values()):
            return None
        return (ours, got) if knobs is None or _reproduces(subject, case, got, knobs) else None

    case, seen = shrunk(subject, trial.case, (trial.ours, trial.yours), still)
    ours, got = seen
    name = first_difference(got, ours) or next(iter(ours))
    note = _where(subject, case, name, got, ours)
    return Finding(
        subject.name,
        kind.name,
        kind.where,
        shown_inputs(case.inputs),
        f"{name} {shown(got[name])}" if name in got else f"no {name}",
        f"{name} {shown(ours[name])}",
        note,
    )


def _is_like(got: Seen, before: Seen) -> bool:
    """NaN stays NaN and numbers stay numbers, so that shrinking does not walk into another bug."""
    return all(is_wild(got[name]) == is_wild(before[name]) for name in got.keys() & before.keys())


def _where(subject: Subject, case: Case, name: str, got: Seen, ours: Seen) -> str:
    """The first place of difference, and what holds for all such places."""
    a, b = got.get(name), ours[name]
    if a is None or a.shape != b.shape:
        return ""
    bad = places(a, b)
    told = [f"it shows with {case.about}"] if case.about else []
    if b.ndim:
        first = [int(i) for i in bad.nonzero()[0]]
        words = ("row", "position", "column")
        told.append("first at " + ", ".join(f"{w} {i}" for w, i in zip(words, first, strict=False)))
    if fact := _covering(subject, case, bad):
        told.append(f"only where {fact}")
    return "; ".join(told)


def _covering(subject: Subject, case: Case, bad: Tensor) -> str:
    """The narrowest fact that holds at every differing place and not everywhere."""
    best = ""
    size = bad.numel()
    for fact, holds in subject.facts(case.inputs).items():
        if holds.shape == bad.shape and bool((holds | ~bad).all()) and int(holds.sum()) < size:
            best, size = fact, int(holds.sum())
    return best


def _generic(subject: Subject, differing: list[_Trial]) -> Kind:
    """What a difference looks like that no known mistake explains."""
    trial = differing[0]
    name = first_difference(trial.yours, trial.ours) or ""
    got, right = trial.yours.get(name), trial.ours[name]
    if got is None or got.shape != right.shape:
        shape = "nothing" if got is None else f"shape {tuple(got.shape)}"
        return Kind(f"its {name} has {shape} where the handout asks for {tuple(right.shape)}", "the return line")
    if is_wild(got) and not is_wild(right):
        where = "divisions by what can be 0, logarithms of 0 and exponentials of large numbers"
        return Kind(f"its {name} is not finite (NaN or inf)", where)
    factors = [multiple(t.yours[name], t.ours[name]) for t in differing if name in t.yours]
    if factors[0] is not None and all(factors):
        if all(factor is not None and abs(factor + 1) < 1e-3 for factor in factors):
            return Kind(f"its {name} has the opposite sign", "the minus signs")
        if not right.ndim or right.numel() > 1:
            told = ", ".join(f"{factor:.4g}" for factor in dict.fromkeys(round(f or 0, 6) for f in factors))
            where = "what it is divided by or multiplied with"
            return Kind(f"its {name} is a multiple of what it should be ({told} times)", where)
    same = [n for n in trial.ours if n in trial.yours and first_difference({n: trial.yours[n]}, {n: trial.ours[n]})]
    right_ones = [n for n in trial.ours if n not in same and len(trial.ours) > 1]
    told = f", while {' and '.join(right_ones)} agree{'s' * (len(right_ones) == 1)}" if right_ones else ""
    return Kind(f"other {name} than ours{told}", "the place that the smallest example shows")


def _of_fault(subject: Subject, yours: Yours, trial: _Trial, always: bool) -> Finding:
    """A fault with the smallest inputs that still bring it about."""
    assert trial.fault is not None
    fault = trial.fault

    def still(case: Case) -> tuple[Seen, Seen] | None:
        try:
            subject.observe(yours, case.inputs)
        except Fault as other:
            alike = other.kind == fault.kind and other.yours.partition(":")[0] == fault.yours.partition(":")[0]
            return ({}, {}) if alike else None
        return None

    case, _ = shrunk(subject, trial.case, ({}, {}), still)
    told = [] if always else [f"not always: with {trial.case.about or 'these inputs'}"]
    return Finding(
        subject.name, *fault.kind, shown_inputs(case.inputs), fault.yours, fault.ours or "an answer", "; ".join(told)
    )
