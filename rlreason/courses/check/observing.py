"""Try one function on all its cases, explain differences, and shrink the inputs that show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import Yours, answer_parts, fresh, gradient, tensor
from rlreason.courses.check.subject import (
    Bug,
    CallCase,
    Fault,
    Function,
    Inputs,
    Kind,
    Mistake,
    NotWrittenError,
    Observed,
    Subject,
    UnwrittenFault,
    inputs_as_text,
    short_text,
)

RELATIVE, OF_LARGEST, ABSOLUTE = 2e-4, 2e-5, 1e-6
CLEARLY = 0.02  # a relative difference that shows in four digits


def places(yours: Tensor, ours: Tensor, relative: float = RELATIVE) -> Tensor:
    """Return where two tensors of one shape differ by more than rounding, as bool. NaN equals NaN."""
    a, b = yours.detach().double(), ours.detach().double()
    finite = b[b.isfinite()].abs()
    largest = finite.max() if len(finite) else b.new_zeros(())
    allowed = ABSOLUTE + relative * b.abs() + OF_LARGEST * largest
    same = ((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan())
    return ~same


def first_difference(yours: Observed, ours: Observed, relative: float = RELATIVE) -> str | None:
    """Return the name of the first observation that differs in shape or value; None if all are equal."""
    for name, right in ours.items():
        got = yours.get(name)
        if got is None or got.shape != right.shape or bool(places(got, right, relative).any()):
            return name
    return None


def multiple(yours: Tensor, ours: Tensor) -> float | None:
    """Return the number k other than 1 with yours = k ours everywhere, or None."""
    a, b = yours.detach().double().flatten(), ours.detach().double().flatten()
    if a.shape != b.shape or not bool(b.any()) or not bool(a.isfinite().all() & b.isfinite().all()):
        return None
    factor = float((a @ b) / (b @ b))
    fits = not bool(places(a, factor * b).any())
    return factor if fits and abs(factor - 1) > 1e-3 else None


def _is_finite(value: Tensor) -> bool:
    return bool(value.detach().double().isfinite().all())


LEAVES = ("policy_log_probs", "per_token_policy_gradient_loss", "tensor")  # inputs whose gradient is observed


def observe(subject: Subject, function: Function, inputs: Inputs) -> Observed:
    """Return the results of a call, and the gradient of its leaf; `Fault` if it returns something else."""
    leaf = next((name for name in LEAVES if name in inputs), "")
    call = fresh(inputs, leaf)
    results = _results(subject, function(**call), inputs)
    observed = {name: tensor(value, name, subject.scalar) for name, value in results.items()}
    name, value = next(iter(results.items()))
    if subject.calls_backward:
        observed[f"gradient of {leaf}"] = _grad(call[leaf])
        function(**call)
        observed["gradient after a second call"] = _grad(call[leaf])
    elif "model" in inputs:
        weight = inputs["model"].get_output_embeddings().weight
        observed["gradient of the model's weights"] = gradient(value, weight)
    elif leaf and isinstance(value, Tensor) and not bool(observed[name].isnan().any()):
        mask = inputs.get("response_mask")  # what a loss is elsewhere is left open
        if mask is None or mask.shape != value.shape:
            mask = torch.ones_like(value)
        observed[name] = observed[name].where(mask.bool(), 0.0)
        observed[f"gradient of {leaf}"] = gradient(value, call[leaf], mask)
    return observed


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def _results(subject: Subject, answer: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the results of an answer by name, without the metadata."""
    if isinstance(subject.returns, str):
        return {subject.returns: answer}
    if isinstance(subject.returns, tuple):
        parts = zip(subject.returns, answer_parts(answer, subject.returns), strict=True)
        return dict(reversed([(name, part) for name, part in parts if name != "metadata"]))  # rewards before advantages
    names = [name for name in subject.returns if name != "token_entropy" or inputs["return_token_entropy"]]
    if hasattr(answer, "keys") and set(names) <= set(answer.keys()):
        return {name: answer[name] for name in names}
    got = list(answer.keys()) if hasattr(answer, "keys") else type(answer).__name__
    kind = Kind("it returns something else than the handout asks for", "the dictionary that is returned")
    raise Fault(kind, str(got), f"a dictionary with {', '.join(names)}")


class _Trial:
    """One case: our results, and the user's results or fault."""

    def __init__(self, subject: Subject, yours: Yours, case: CallCase) -> None:
        self.case = case
        self.ours = observe(subject, subject.ours, case.inputs)
        self.fault: Fault | None = None
        self.yours: Observed = {}
        try:
            self.yours = observe(subject, yours, case.inputs)
        except Fault as fault:
            self.fault = fault
        self.differs = self.fault is not None or not _agree(subject, case.inputs, self.yours, self.ours)


def _agree(subject: Subject, inputs: Inputs, yours: Observed, ours: Observed) -> bool:
    """Return whether the results are ours, or ours for other inputs that are right too."""
    if first_difference(yours, ours) is None:
        return True
    other = subject.as_well(inputs)
    return other is not None and first_difference(yours, observe(subject, subject.ours, other)) is None


def examine(subject: Subject, yours: Yours) -> list[Bug]:
    """Return the bugs of the user's function; [] if it agrees with ours on every trial.

    `NotWrittenError` if no case is written yet.
    """
    try:
        yours.check_signature()
    except Fault as fault:
        return [Bug(subject.name, *fault.kind, yours=fault.yours)]
    findings: list[Bug] = []
    tried = [case for case in subject.cases() if yours.has_defaults(case.inputs)]
    trials = [_Trial(subject, yours, case) for case in tried]
    if trials and all(isinstance(trial.fault, UnwrittenFault) for trial in trials):
        raise NotWrittenError
    for branch in dict.fromkeys(trial.case.branch for trial in trials):
        same_branch = [trial for trial in trials if trial.case.branch == branch]
        if branch in subject.optional:  # a handout's function need not know it
            if any(trial.differs for trial in same_branch) and not any(trial.fault for trial in same_branch):
                kind = next(_bugs_of_branch(subject, yours, same_branch)).kind
                about = same_branch[0].case.about
                yours.notes.append(f"{about}, which is left open, is treated otherwise than here: {kind}")
            continue
        for finding in _bugs_of_branch(subject, yours, same_branch):
            if finding.kind not in {earlier.kind for earlier in findings}:
                findings.append(finding)
    if not findings:
        for check_property in subject.properties:
            findings += list(check_property(yours))
    return findings


def _bugs_of_branch(subject: Subject, yours: Yours, trials: Sequence[_Trial]) -> Iterator[Bug]:
    """Yield at most two bugs: of the cases that differ, and of those that fail."""
    comparable = [trial for trial in trials if trial.fault is None]
    differing = [trial for trial in comparable if trial.differs]
    if differing:
        kind, mistake = _explained(subject, yours, comparable, differing)
        yield _example(subject, yours, differing[0], kind, mistake)
    faulty = next((trial for trial in trials if trial.fault), None)
    if faulty and (not differing or len(faulty.case.about) > 0):
        yield _bug_of_fault(subject, yours, faulty, all(trial.fault for trial in trials))


def _explained(
    subject: Subject, yours: Yours, comparable: list[_Trial], differing: list[_Trial]
) -> tuple[Kind, Mistake | None]:
    """Return the kind of bug, and the known mistake that gives the user's results on every trial if there is one."""
    again = _Trial(subject, yours, differing[0].case)
    if again.fault is None and first_difference(again.yours, differing[0].yours) is not None:
        random = Kind(
            "the same inputs do not give the same answer twice", "random numbers, and what is kept between calls"
        )
        return random, None
    trials = sorted(comparable, key=lambda trial: not trial.differs)
    for mistake in subject.mistakes:
        if all(_reproduces(subject, trial.case, trial.yours, mistake) for trial in trials):
            return mistake.kind, mistake
    meant = next((trial.case.meaning for trial in differing if trial.case.meaning), None)
    if meant and all(trial.case.meaning for trial in differing):
        return meant, None
    if (kind := subject.hint(subject, yours)) is not None:
        return kind, None
    return _generic(differing), None


def _reproduces(subject: Subject, case: CallCase, yours: Observed, mistake: Mistake) -> bool:
    """Return whether the function with this mistake gives the user's results."""
    try:
        guess = observe(subject, subject.wrong_function(mistake), case.inputs)
    except Exception:  # a mistake may make nonsense of some case
        return False
    return guess.keys() == yours.keys() and first_difference(guess, yours) is None


def _generic(differing: list[_Trial]) -> Kind:
    """Describe a difference that no known mistake explains."""
    trial = differing[0]
    name = first_difference(trial.yours, trial.ours) or ""
    got, right = trial.yours.get(name), trial.ours[name]
    if got is None or got.shape != right.shape:
        shape = "nothing" if got is None else f"shape {tuple(got.shape)}"
        return Kind(f"its {name} has {shape} where the handout asks for {tuple(right.shape)}", "the return line")
    if not _is_finite(got) and _is_finite(right):
        where = "divisions by what can be 0, logarithms of 0 and exponentials of large numbers"
        return Kind(f"its {name} is not finite (NaN or inf)", where)
    factors = [multiple(t.yours[name], t.ours[name]) for t in differing if name in t.yours]
    first = factors[0]
    if first is not None and all(f is not None and abs(f - first) <= 1e-3 * abs(first) for f in factors):
        if abs(first + 1) < 1e-3:
            return Kind(f"its {name} has the opposite sign", "the minus signs")
        where = "what it is divided by or multiplied with"
        return Kind(f"its {name} is a multiple of what it should be ({first:.4g} times)", where)
    agreeing = [n for n in trial.ours if n in trial.yours and not bool(places(trial.yours[n], trial.ours[n]).any())]
    rest = f", while {' and '.join(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'}" if agreeing else ""
    return Kind(f"other {name} than ours{rest}", "the place that the smallest example shows")


def _example(subject: Subject, yours: Yours, trial: _Trial, kind: Kind, mistake: Mistake | None) -> Bug:
    """Return the bug with the smallest inputs that still show it."""

    def still_differs(inputs: Inputs) -> Pair | None:
        ours, got = observe(subject, subject.ours, inputs), observe(subject, yours, inputs)
        if first_difference(got, ours, CLEARLY) is None or _agree(subject, inputs, got, ours):
            return None
        for now, before in ((got, trial.yours), (ours, trial.ours)):  # what was finite stays so: no other bug
            if any(_is_finite(now[name]) != _is_finite(before[name]) for name in now.keys() & before.keys()):
                return None
        case = replace(trial.case, inputs=inputs)
        return (ours, got) if mistake is None or _reproduces(subject, case, got, mistake) else None

    inputs, (ours, got) = shrunk(trial.case.inputs, (trial.ours, trial.yours), still_differs)
    name = first_difference(got, ours) or next(iter(ours))
    result = f"{name} {short_text(got[name])}" if name in got else f"no {name}"
    right = f"{name} {short_text(ours[name])}"
    notes = [f"it shows with {trial.case.about}"] if trial.case.about else []
    if name in got and ours[name].ndim and got[name].shape == ours[name].shape:
        first = places(got[name], ours[name]).nonzero()[0].tolist()
        dims = ("row", "position", "column")
        notes.append("first at " + ", ".join(f"{dim} {i}" for dim, i in zip(dims, first, strict=False)))
    return Bug(subject.name, *kind, inputs_as_text(inputs), result, right, "; ".join(notes))


def _bug_of_fault(subject: Subject, yours: Yours, trial: _Trial, always: bool) -> Bug:
    """Return a fault with the smallest inputs that still cause it."""
    assert trial.fault is not None
    fault = trial.fault

    def still_fails(inputs: Inputs) -> Pair | None:
        try:
            observe(subject, yours, inputs)
        except Fault as other:
            alike = other.kind == fault.kind and other.yours.partition(":")[0] == fault.yours.partition(":")[0]
            return ({}, {}) if alike else None
        return None

    inputs, _ = shrunk(trial.case.inputs, ({}, {}), still_fails)
    note = "" if always else f"not always: with {trial.case.about or 'these inputs'}"
    return Bug(subject.name, *fault.kind, inputs_as_text(inputs), fault.yours, fault.ours or "an answer", note)


SECONDS, CALLS = 0.7, 120
Pair = tuple[Observed, Observed]  # ours, the user's


def shrunk(inputs: Inputs, pair: Pair, still: Callable[[Inputs], Pair | None]) -> tuple[Inputs, Pair]:
    """Return the smallest inputs for which `still` returns a pair, and that pair. Bounded in time and calls."""
    until, left = time.monotonic() + SECONDS, CALLS
    moved = True
    while moved:
        moved = False
        for smaller in _smaller(inputs):
            if left == 0 or time.monotonic() > until:
                return inputs, pair
            if "response_mask" in smaller and not bool(smaller["response_mask"].any(-1).all()):
                continue  # handouts leave rows without tokens open
            left -= 1
            try:
                found = still(smaller)
            except Exception:  # either may refuse the smaller inputs
                found = None
            if found is not None:
                inputs, pair, moved = smaller, found, True
                break
    return inputs, pair


def _smaller(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the inputs without a group of rows, without a column, with smaller groups, with rounded numbers."""
    group = inputs.get("group_size", 1)
    sizes: list[tuple[int, ...]] = [tuple(value.shape) for value in inputs.values() if isinstance(value, Tensor)]
    sizes += [(len(value),) for value in inputs.values() if isinstance(value, list)]
    n_rows = max(size[0] for size in sizes)
    if n_rows > group:
        for first in range(n_rows - group, -1, -group):
            yield _without(inputs, range(first, first + group), 0)
    for dim, fewest in ((1, 1), (2, 2)):
        length = max((size[dim] for size in sizes if len(size) > dim), default=0)
        for place in range(length - 1, -1, -1):
            if length > fewest:
                yield _without(inputs, [place], dim)
    if group > 2 and n_rows % group == 0:
        yield {**_without(inputs, range(group - 1, n_rows, group), 0), "group_size": group - 1}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            for step in (1.0, 2.0, 10.0):
                rounded = (value * step).round() / step
                if torch.equal(rounded, value):
                    break
                yield {**inputs, name: rounded}


def _without(inputs: Inputs, places: Sequence[int], dim: int) -> Inputs:
    """Remove places along a dimension of all tensors that have it, and of all lists along the first."""
    smaller = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] > 1:
            rest = [i for i in range(value.shape[dim]) if i not in places]
            smaller[name] = value.index_select(dim, torch.tensor(rest))
        elif isinstance(value, list) and dim == 0:
            smaller[name] = [item for i, item in enumerate(value) if i not in places]
    return smaller
