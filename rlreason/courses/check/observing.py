"""Try one function on all its cases, and explain where its results differ from ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import answer_parts, call, fits, fresh, gradient, tensor
from rlreason.courses.check.mistakes import Mistake, mistakes
from rlreason.courses.check.records import (
    RAISES,
    Bug,
    Case,
    Fault,
    Function,
    Inputs,
    Kind,
    NotWrittenError,
    Observed,
    short_text,
)

RELATIVE, OF_LARGEST, ABSOLUTE = 2e-4, 2e-5, 1e-6
CLEARLY = 0.02  # a relative difference that shows in four digits


@dataclass(frozen=True)
class Subject:
    """All cases and known mistakes of one function of a handout."""

    ours: Function
    cases: Callable[[], Sequence[Case]]
    returns: str | tuple[str, ...] | list[str]  # one result, the items of a tuple, or the keys of a dictionary
    wrong: Callable[[Inputs, Mistake], Any]  # its answer with this mistake
    scalar: bool = False  # it returns one number
    calls_backward: bool = False

    @property
    def name(self) -> str:
        """Return the handout's name of the function."""
        return str(self.ours.__name__)

    def right(self, inputs: Inputs) -> Observed:
        """Return what our function is observed to return."""
        return observe(self, lambda i: self.ours(**i), inputs)

    def mistaken(self, inputs: Inputs, mistake: Mistake) -> Observed:
        """Return what our function with this mistake is observed to return."""
        return observe(self, lambda i: self.wrong(i, mistake), inputs)


def places(yours: Tensor, ours: Tensor, relative: float = RELATIVE) -> Tensor:
    """Return where two tensors of one shape differ by more than rounding, as bool. NaN equals NaN."""
    a, b = yours.detach().double(), ours.detach().double()
    largest = b.abs().where(b.isfinite(), 0.0).max()
    allowed = ABSOLUTE + relative * b.abs() + OF_LARGEST * largest
    return ~(((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()))


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
    is_multiple = not bool(places(a, factor * b).any())
    return factor if is_multiple and abs(factor - 1) > 1e-3 else None


LEAVES = ("policy_log_probs", "per_token_policy_gradient_loss", "tensor")  # inputs whose gradient is observed


def observe(subject: Subject, function: Callable[[Inputs], Any], inputs: Inputs) -> Observed:
    """Return the results of a call, and the gradient of its leaf; `Fault` if it returns something else."""
    leaf = next((name for name in LEAVES if name in inputs), "")
    arguments = fresh(inputs, leaf)
    results = _results(subject, function(arguments), inputs)
    if "reward_fn" in inputs:
        pairs = list(zip(inputs["rollout_responses"], inputs["repeated_ground_truths"], strict=True))
        if bug := misjudged(pairs, arguments["reward_fn"].calls, inputs["repeated_ground_truths"]):
            raise Fault(bug.name, bug.where, bug.yours, bug.ours)
    observed = {name: tensor(value, name, subject.scalar) for name, value in results.items()}
    name, value = next(iter(results.items()))
    if subject.calls_backward:
        observed[f"gradient of {leaf}"] = _grad(arguments[leaf])
        function(arguments)
        observed["gradient after a second call"] = _grad(arguments[leaf])
    elif "model" in inputs:
        weight = inputs["model"].get_output_embeddings().weight
        observed["gradient of the model's weights"] = gradient(value, weight)
    elif leaf and isinstance(value, Tensor) and not bool(observed[name].isnan().any()):
        mask = inputs.get("response_mask")  # what a loss is elsewhere is left open
        if mask is None or mask.shape != value.shape:
            mask = torch.ones_like(value)
        observed[name] = observed[name].where(mask.bool(), 0.0)
        observed[f"gradient of {leaf}"] = gradient(value, arguments[leaf], mask)
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
    keys = list(answer.keys()) if hasattr(answer, "keys") else type(answer).__name__
    if not set(names) <= set(keys):
        name, where = "it returns something else than the handout asks for", "the dictionary that is returned"
        raise Fault(name, where, str(keys), f"a dictionary with {', '.join(names)}")
    return {name: answer[name] for name in names}


def misjudged(pairs: Sequence[tuple[str, str]], calls: Sequence[tuple[str, str]], truths: Sequence[str]) -> Bug | None:
    """Return the bug of the first (response, its ground truth) that reward_fn was never called with.

    `truths` are the ground truths of all questions.
    """
    judged = {(text.strip(), truth) for text, truth in calls}
    missing = next((pair for pair in pairs if (pair[0].strip(), pair[1]) not in judged), None)
    if missing is None:
        return None
    text, truth = missing
    with_truth = [other for other, its_truth in calls if its_truth == truth]
    others = [its_truth for other, its_truth in calls if other == text]
    yours = f"judged by {others[0]!r}" if others else f"judged text {next(iter(with_truth), 'nothing')!r}"
    if any(its_truth == text for _, its_truth in calls):
        name = "reward_fn gets ground truth and response in swapped places"
    elif others and others[0] in truths:
        name = "answers are misaligned: a response is judged by another question's ground truth"
    elif others:
        name = "reward_fn gets something else than the question's ground truth"
    else:
        name = "the reward is not asked for the text that was sampled"
        if any(other.endswith(text) for other in with_truth):
            name += ": prompt and response are handed over together"
    where = "the call of reward_fn: what is handed to it as response and as ground truth"
    return Bug(name, where, yours, f"response {text!r} judged by {truth!r}")


@dataclass
class _Trial:
    """One case: our results, and the user's results or fault."""

    case: Case
    ours: Observed
    yours: Observed = field(default_factory=dict)
    fault: Bug | None = None
    is_unwritten: bool = False
    differs: bool = False


def _tried(subject: Subject, function: Function, case: Case) -> _Trial:
    trial = _Trial(case, subject.right(case.inputs))
    try:
        trial.yours = observe(subject, lambda inputs: call(function, inputs), case.inputs)
    except Fault as fault:
        trial.fault = fault.bug
    except NotWrittenError:
        trial.fault, trial.is_unwritten = Bug(*RAISES, "NotImplementedError, or None"), True
    else:
        rights = [trial.ours, *([subject.right(case.as_well)] if case.as_well else [])]
        trial.differs = all(first_difference(trial.yours, right) for right in rights)
    return trial


def examine(subject: Subject, function: Function) -> list[Bug]:
    """Return the bugs of the user's function; [] if it agrees with ours on every trial.

    `NotWrittenError` if no case is written yet.
    """
    cases = sorted(subject.cases(), key=lambda case: (case.meaning is not None, _size(case.inputs)))
    cases = [case for case in cases if fits(function, case.inputs)] or cases[:1]
    trials = [_tried(subject, function, case) for case in cases]
    if all(trial.is_unwritten for trial in trials):
        raise NotWrittenError
    bugs: dict[str, Bug] = {}
    for branch in dict.fromkeys(trial.case.branch for trial in trials):
        of_branch = [trial for trial in trials if trial.case.branch == branch]
        if bugs and of_branch[0].case.meaning:
            continue  # it would show the same bugs again
        for bug in _bugs_of_branch(subject, function, of_branch):
            bugs.setdefault(bug.name, bug)
    return list(bugs.values())


def _size(inputs: Inputs) -> int:
    """Return the number of elements of all tensors and lists."""
    values = inputs.values()
    return sum(v.numel() if isinstance(v, Tensor) else len(v) for v in values if isinstance(v, Tensor | list))


def _bugs_of_branch(subject: Subject, function: Function, trials: Sequence[_Trial]) -> Iterator[Bug]:
    """Yield at most two bugs: of the cases that fail, and of those that differ."""
    faulty = [trial.fault.with_inputs(_as_text(trial.case.inputs)) for trial in trials if trial.fault]
    yield from faulty[:1]
    differing = [trial for trial in trials if trial.differs]
    if not differing:
        return
    kind = _explained(subject, function, [trial for trial in trials if not trial.fault], differing)
    trial = next((t for t in differing if first_difference(t.yours, t.ours, CLEARLY)), differing[0])
    name = first_difference(trial.yours, trial.ours) or next(iter(trial.ours))
    got = f"{name} {short_text(trial.yours[name])}" if name in trial.yours else f"no {name}"
    note = f"it shows with {trial.case.branch}" if trial.case.branch and not trial.case.meaning else ""
    yield Bug(*kind, got, f"{name} {short_text(trial.ours[name])}", _as_text(trial.case.inputs), note)


def _as_text(inputs: Inputs) -> dict[str, str]:
    return {name: short_text(value) for name, value in inputs.items() if value is not None}


def _explained(subject: Subject, function: Function, trials: list[_Trial], differing: list[_Trial]) -> Kind:
    """Return the kind of bug: the known mistake that gives the user's results on every trial, if there is one."""
    again = _tried(subject, function, differing[0].case)
    if not again.fault and first_difference(again.yours, differing[0].yours):
        return "the same inputs do not give the same answer twice", "random numbers, and what is kept between calls"
    if meaning := differing[0].case.meaning:
        return meaning
    for mistake in mistakes():
        if all(_gives(subject, mistake, trial) for trial in trials):
            return mistake.name, mistake.where
    return _generic(differing)


def _gives(subject: Subject, mistake: Mistake, trial: _Trial) -> bool:
    """Return whether the function with this mistake gives the user's results."""
    try:
        guess = subject.mistaken(trial.case.inputs, mistake)
    except Exception:  # a mistake may make nonsense of some case
        return False
    return guess.keys() == trial.yours.keys() and first_difference(guess, trial.yours) is None


def _generic(differing: list[_Trial]) -> Kind:
    """Describe a difference that no known mistake explains."""
    trial = differing[0]
    name = first_difference(trial.yours, trial.ours) or ""
    got, right = trial.yours.get(name), trial.ours[name]
    if got is None or got.shape != right.shape:
        shape = "nothing" if got is None else f"shape {tuple(got.shape)}"
        return f"{name}: {shape} where the handout asks for {tuple(right.shape)}", "the return line"
    if not bool(got.isfinite().all()) and bool(right.isfinite().all()):
        where = "divisions by what can be 0, logarithms of 0 and exponentials of large numbers"
        return f"NaN or inf in its {name}", where
    factors = [multiple(t.yours[name], t.ours[name]) for t in differing if name in t.yours]
    first = factors[0]
    if first is not None and all(f is not None and abs(f - first) <= 1e-3 * abs(first) for f in factors):
        return f"{first:.4g} times the right {name}", "what it is divided by or multiplied with"
    agreeing = [n for n in trial.ours if n in trial.yours and not bool(places(trial.yours[n], trial.ours[n]).any())]
    rest = f", with the same {' and '.join(agreeing)}" if agreeing else ""
    return f"other {name} than ours{rest}", "the place that the example shows"
