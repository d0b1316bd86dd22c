"""Findings, and the input of a monitor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

#: Rule -> its commonest causes, and what to try.
RULES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a note about a run: what a live run warns of, `health` lists and a report tabulates."""

    rule: str  # its name, often a monitor's
    what: str  # the problem, in a sentence with its figures
    cure: str = ""  # what to try
    figures: dict[str, float] = field(default_factory=dict)
    problem: bool = True  # or a note, which makes no run unhealthy
    evidence: Sequence[str] = ()  # steps, files, lines
    causes: str = ""  # the commonest causes, in a sentence
    step: int | None = None  # where it began

    @property
    def sentence(self) -> str:
        """Return what is wrong and its cure, joined by a semicolon where the first has a colon of its own."""
        between = "; " if ": " in self.what else ": "
        return f"{self.what}{between}{self.cure}" if self.cure else self.what


def found(rule: str, what: str, figures: dict[str, float] | None = None, words: str = "", **more: Any) -> Finding:
    """Return a finding with the causes and the cure of its rule in rules.yaml, or of its entry `words`."""
    own, figures = RULES[words or rule], figures or {}
    cure = own.get("cure", "").format(**figures)
    return Finding(rule, what, cure, figures, causes=own.get("causes", ""), **more)


Metrics = Mapping[str, float]
FEWEST_ASKED = 8  # questions; an evaluation of fewer says too little


@dataclass(frozen=True, slots=True)
class Observation:
    """The input of the monitors after a step or an evaluation."""

    metrics: Metrics
    updates: Sequence[Metrics] = ()  # of the step, one by one
    limits: Mapping[str, Any] = field(default_factory=dict)  # the settings in use, as `MonitorsConfig` names them
    #: Metric -> its first value in the run and those of earlier steps, the largest of each step's updates.
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite_weights: bool = True
    group_size: int = 1
    evaluations: Sequence[Metrics] = ()  # all of the run; empty where none has been added
    eval_limit: str = ""  # the setting at which evaluations cut responses, where it is not that of the rollouts
    steps: bool = True  # whether the run has any, so that an evaluation is one of several

    def finite(self) -> "Observation":
        """Return the same without metrics that are not finite."""

        def kept(metrics: Metrics) -> Metrics:
            return {name: value for name, value in metrics.items() if math.isfinite(value)}

        return replace(self, metrics=kept(self.metrics), updates=[kept(update) for update in self.updates])

    def worst(self, name: str) -> float | None:
        """Return the largest value of a metric among the step's updates; None where none measured it."""
        return max((u[name] for u in self.updates if name in u), default=None)

    def before(self, name: str) -> Sequence[float]:
        """Return the values of a metric in the earlier steps."""
        return self.history.get(name, ())
