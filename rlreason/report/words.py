"""What a comparison says, in sentences that follow the interval and go no further. Differences are in accuracy points.

The rules are those of docs/verdicts.md; a direction is named only where the interval, and Holm's correction, allow it.
"""

from collections.abc import Sequence

from rlreason.report.content import Verdict
from rlreason.report.study import Study
from rlreason.statistics import Difference, seeds_needed
from rlreason.statistics.differences import LEVEL, PROBLEMS

MINUS = "\N{MINUS SIGN}"
SATURATED = (0.02, 0.95)  # both sides below the one or above the other: the task cannot separate them
WIDE = 0.08  # accuracy: an interval of this width also allows differences that matter
MOST_NAMED = 3  # settings that a summary names one by one


def size(difference: float) -> str:
    """An amount in points, without a sign: `size(-0.127)` is '12.7'."""
    points = 100 * abs(difference)
    return f"{points:.1f}" if points >= 0.05 or not points else f"{points:.1g}"


def signed(difference: float) -> str:
    """A difference in points with its sign.

    >>> signed(-0.0173), signed(0.089), signed(0.0001)
    ('\N{MINUS SIGN}1.7', '+8.9', '0.0')
    """
    text = f"{100 * difference:+.1f}".replace("-", MINUS)
    return "0.0" if text[1:] == "0.0" else text


def between(found: Difference) -> str:
    """Where the difference lies."""
    return f"between {signed(found.low)} and {signed(found.high)} accuracy points"


def interval(found: Difference) -> str:
    """The interval of a difference whose sign is known, as amounts."""
    low, high = sorted((abs(found.low), abs(found.high)))
    return f"95% interval {size(low)} to {size(high)}"


def p_word(p: float) -> str:
    """A p-value: 'p = 0.024' or 'p < 0.001'."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def outcome_of(found: Difference, adjusted_p: float, equal_within: float) -> str:
    """better, worse, same or cannot tell, by the interval of a difference and its p-value adjusted by Holm.

    One seed on a side tells trained models apart and no settings: `cannot tell`, whatever the interval.
    """
    if found.over == PROBLEMS:
        return "cannot tell"
    return of_models(found, adjusted_p, equal_within)


def of_models(found: Difference, adjusted_p: float, equal_within: float) -> str:
    """The same where what is compared are the models themselves."""
    if adjusted_p <= LEVEL:
        return "better" if found.mean > 0 else "worse"
    return "same" if -equal_within < found.low and found.high < equal_within else "cannot tell"


def sentence(
    a: str, b: str, found: Difference, outcome: str, comparisons: int, equal_within: float, settles: bool = True
) -> str:
    """The verdict on `a` against the reference `b`. `settles`: say what it would take to tell."""
    if outcome in ("better", "worse"):
        return f"{a} is {outcome} than {b} by {size(found.mean)} accuracy points ({interval(found)})."
    if outcome == "same":
        lies = f"95% interval {signed(found.low)} to {signed(found.high)}"
        return f"No difference larger than {100 * equal_within:g} points between {a} and {b} ({lies})."
    if found.low > 0 or found.high < 0:
        looks = "better" if found.mean > 0 else "worse"
        return (
            f"{a} looks {looks} than {b}, but not after correcting for {comparisons} comparisons: by itself, the "
            f"difference lies {between(found)}."
        )
    text = f"{a} and {b} cannot be told apart: the difference lies {between(found)}."
    return f"{text} {settling(found, comparisons)}" if settles else text


def settling(found: Difference, comparisons: int = 1) -> str:
    """What it would take to tell: seeds, or problems."""
    if abs(found.mean) < 0.0005:
        if found.high - found.low > WIDE:
            return "More seeds and problems would narrow the interval; none would settle so small a difference."
        return "Nothing would settle so small a difference."
    needed = seeds_needed(found, LEVEL / max(comparisons, 1))
    if needed is not None:
        return f"About {max(needed, found.seeds + 1)} seeds would settle a difference of this size half of the time."
    if found.se_extra > 0 and abs(found.mean) < 2 * found.se_extra:
        these = f"these {found.problems:,} problems" if found.problems > 1 else "this one problem"
        return f"More seeds on {these} would not settle it: more problems would."
    return "Not even a thousand seeds would settle a difference of this size."


def of_one_seed(a: str, b: str, found: Difference, outcome: str, comparisons: int, equal_within: float) -> str:
    """The verdict where a side has one seed: over problems only, and of the trained models."""
    start = "One seed on a side: this compares these trained models, not the settings."
    said = sentence(f"Model {a}", b, found, outcome, comparisons, equal_within, settles=False)
    return f"{start} {said.replace('(95% interval', '(over problems only, 95% interval')}"


def of_diverged(a: str, b: str, found: Difference, outcome: str, diverged: int, seeds: int, comparisons: int) -> str:
    """The verdict on a setting that diverged in some seeds."""
    start = f"{a} diverged in {diverged} of {seeds} seed{'s' * (seeds != 1)}."
    if outcome in ("better", "worse"):
        where = "above" if outcome == "better" else "below"
        return f"{start} Counted as it is, it ends {size(found.mean)} accuracy points {where} {b} ({interval(found)})."
    return f"{start} {sentence(a, b, found, 'cannot tell', comparisons, 0.0)}"


def of_saturated(means: tuple[float, float]) -> str:
    """That a task cannot separate two settings, where both are at its end; else nothing."""
    if max(means) < SATURATED[0]:
        return f"Both are below {SATURATED[0]:.0%}: this task cannot separate them."
    if min(means) > SATURATED[1]:
        return f"Both are above {SATURATED[1]:.0%}: this task cannot separate them."
    return ""


def small_line(found: Difference, adjusted_p: float, comparisons: int, by_seed: int) -> str:
    """What a verdict rests on, in brief."""
    if found.over == PROBLEMS:
        seeds = "one seed on a side"
    elif by_seed and found.over != "unpaired seeds":
        seeds = f"{found.seeds} paired seeds"
    else:
        seeds = f"{found.seeds} or more seeds, unpaired"
    family = f" (Holm, {comparisons} comparisons)" if comparisons > 1 else ""
    problems = f"{found.problems:,} problem{'s' * (found.problems != 1)}"
    return f"{seeds} \N{MIDDLE DOT} {problems} \N{MIDDLE DOT} {p_word(adjusted_p)}{family}"


def summary_of(verdicts: Sequence[Verdict], study: Study) -> str:
    """All verdicts of a study in one sentence."""
    if not verdicts:
        return _of_one_setting(study)
    reference = study.reference.name
    by_word: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_word.setdefault(verdict.word, []).append(verdict.setting)
    said: list[str] = []
    for word, verbs, rest in (
        ("better", ("beats", "beat"), f" {reference}"),
        ("same", ("is as good as", "are as good as"), f" {reference}"),
        ("cannot tell", ("cannot be told apart from", "cannot be told apart from"), f" {reference}"),
        ("worse", ("is worse than", "are worse than"), f" {reference}"),
        ("diverged", ("diverges", "diverge"), ""),
        ("not compared", ("is not compared", "are not compared"), ""),
    ):
        if names := by_word.get(word):
            said.append(f"{_joined(names, len(verdicts))} {verbs[len(names) > 1]}{rest if not said else _again(rest)}")
    text = "; ".join(said)
    return f"{text}."


def _again(rest: str) -> str:
    return " it" if rest else ""


def _joined(names: Sequence[str], of: int) -> str:
    if len(names) > MOST_NAMED:
        return f"{len(names)} of {of} settings"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _of_one_setting(study: Study) -> str:
    accuracies = [run.accuracy for run in study.runs if run.accuracy is not None]
    if not accuracies:
        return "Nothing has been measured yet."
    mean, n = sum(accuracies) / len(accuracies), len(accuracies)
    return f"One setting, {n} run{'s' * (n > 1)}: it ends at {100 * mean:.1f}%. There is nothing to compare it with."
