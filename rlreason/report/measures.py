"""Define what a report draws over training: each measure's name, unit, axis, and source in a run's metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlreason.report.study import Series, StudyRun

PERCENT, FINE_PERCENT, PLAIN, SHORT, GENERAL = ".0%", ".1%", ".2f", "~s", "~g"
DEPTH = "logarithmic axis"


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of one picture. `sources`: metrics; the first that any run has is drawn."""

    name: str
    title: str
    unit: str
    format: str  # of its axis and values, as d3 has it
    sources: Sequence[str]
    minus: str = ""  # source - minus
    rest: bool = False  # 1 - source
    share: bool = False  # is in 0 to 1
    log: bool = False  # on a logarithmic axis

    def of(self, run: StudyRun) -> Series | None:
        """Return the series of a run; None if it was not measured."""
        found = next((run.series[source] for source in self.sources if source in run.series), None)
        if found is None:
            return None
        if self.minus:
            return difference_of(found, run.series[self.minus]) if self.minus in run.series else None
        return Series(found.x, 1 - found.y) if self.rest else found


def difference_of(a: Series, b: Series) -> Series | None:
    """Return one metric minus another, in the rows that agree on every axis.

    >>> import numpy as np
    >>> at = {"step": np.array([0.0, 1.0])}
    >>> difference_of(Series(at, np.array([0.5, 0.75])), Series({"step": at["step"][1:]}, np.array([0.25]))).y
    array([0.5])
    """
    axes = [axis for axis in a.x if axis in b.x]
    places = {at: k for k, at in enumerate(zip(*(b.x[axis] for axis in axes), strict=True))}
    pairs = [(i, places[at]) for i, at in enumerate(zip(*(a.x[axis] for axis in axes), strict=True)) if at in places]
    if not pairs:
        return None
    mine, its = (list(side) for side in zip(*pairs, strict=True))
    return Series({axis: a.x[axis][mine] for axis in axes}, a.y[mine] - b.y[its])


ACCURACY = Measure("eval/accuracy", "Validation accuracy", "share of problems", PERCENT, ["eval/accuracy"], share=True)

#: In the order of the page. What no run has measured is left out of it.
MEASURES = [
    ACCURACY,
    Measure("reward/mean", "Training reward", "mean of the rollout batch", PLAIN, ["reward/mean"]),
    Measure("reward/format", "Format reward", "mean of the rollout batch", PLAIN, ["reward/format"]),
    Measure("reward/answer", "Answer reward", "mean of the rollout batch", PLAIN, ["reward/answer"]),
    Measure("entropy", "Token entropy", "nats, mean over sampled tokens", PLAIN, ["rollout/entropy", "eval/entropy"]),
    Measure("length", "Response length", "tokens, mean", SHORT, ["rollout/length", "eval/length"]),
    Measure(
        "length_correct",
        "Length of correct responses",
        "tokens, mean",
        SHORT,
        ["rollout/length_correct", "eval/length_correct"],
    ),
    Measure(
        "length_wrong",
        "Length of incorrect responses",
        "tokens, mean",
        SHORT,
        ["rollout/length_wrong", "eval/length_wrong"],
    ),
    Measure("train/grad_norm", "Gradient norm", f"before clipping; {DEPTH}", GENERAL, ["train/grad_norm"], log=True),
    Measure(
        "train/clip_fraction", "Clip fraction", "share of tokens", FINE_PERCENT, ["train/clip_fraction"], share=True
    ),
    Measure(
        "mismatch",
        "Train-inference mismatch",
        f"mean gap of log-probabilities, nats a token; {DEPTH}",
        GENERAL,
        ["rollout/mismatch_mean"],
        log=True,
    ),
    Measure(
        "live_groups",
        "Live groups",
        "share of groups whose rewards differ",
        PERCENT,
        ["reward/frac_reward_zero_std"],
        rest=True,
        share=True,
    ),
    Measure(
        "truncated",
        "Truncated responses",
        "share cut at the token limit",
        PERCENT,
        ["rollout/truncated", "eval/truncated"],
        share=True,
    ),
    Measure(
        "wrong_with_format",
        "Wrong, but well-formed",
        "share of validation responses: format 1, answer 0",
        PERCENT,
        ["eval/format"],
        minus="eval/accuracy",
        share=True,
    ),
    Measure(
        "no_format",
        "Without the format",
        "share of validation responses: format 0, answer 0",
        PERCENT,
        ["eval/format"],
        rest=True,
        share=True,
    ),
]


def value_text(value: float, pattern: str) -> str:
    """Return a value as text in a sentence.

    >>> value_text(0.7625, ".0%"), value_text(123.4, "~s"), value_text(0.00123, "~g"), value_text(0.5, ".2f")
    ('76.2%', '123', '0.0012', '0.50')
    """
    if pattern.endswith("%"):
        return f"{value:.1%}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
