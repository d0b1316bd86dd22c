"""Whether a run's budget allows one more step, with the last evaluation behind it."""

from collections.abc import Mapping

from rlreason.config.budget import BudgetConfig

MARGIN = 1.2  # on predicted times: a step or an evaluation may take longer than the one before


def seconds_ahead(pace: Mapping[str, float], due_problems: int, last_problems: int) -> float:
    """Predicted seconds of what is due, of the next step and of the last evaluation.

        1.2 (t_step + t_problem (n_due + n_last))

    pace: seconds of the newest "step" and of the newest evaluation per "problem"; what is not known yet counts as 0.
    due_problems: of an evaluation that comes before the next step; last_problems: of the last evaluation.

    >>> seconds_ahead({"step": 5.0, "problem": 0.01}, due_problems=0, last_problems=1000)
    18.0
    """
    return MARGIN * (pace.get("step", 0.0) + pace.get("problem", 0.0) * (due_problems + last_problems))


def spent(
    budget: BudgetConfig, steps: int, tokens: float, seconds: float, pace: Mapping[str, float], ahead: float
) -> str:
    """Why the budget does not allow another step; "" where it does.

    steps, tokens, seconds: what the whole run has used so far. ahead: seconds that the next step and the evaluations
    need. The next step is expected to sample as many tokens as the newest.

    >>> spent(BudgetConfig(steps=3), 3, 0, 0.0, {}, 0.0)
    'budget.steps=3 are done'
    >>> spent(BudgetConfig(hours=1.0), 3, 0, 3500.0, {}, 200.0)
    'budget.hours=1: 100 s are left, and the next step and the last evaluation would take about 200 s'
    >>> spent(BudgetConfig(tokens=100), 1, 60.0, 0.0, {"tokens": 60.0}, 0.0)
    'budget.tokens=100: 40 are left, and the newest step sampled 60'
    """
    if budget.steps is not None and steps >= budget.steps:
        return f"budget.steps={budget.steps} are done"
    if budget.tokens is not None and tokens + pace.get("tokens", 0.0) > budget.tokens:
        left = max(budget.tokens - tokens, 0)
        return f"budget.tokens={budget.tokens}: {left:.0f} are left, and the newest step sampled {pace['tokens']:.0f}"
    if budget.hours is not None and seconds + ahead > budget.hours * 3600:
        left = max(budget.hours * 3600 - seconds, 0.0)
        return (
            f"budget.hours={budget.hours:g}: {left:.0f} s are left, and the next step and the last evaluation would "
            f"take about {ahead:.0f} s"
        )
    return ""
