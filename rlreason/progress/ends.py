"""What ends a run before its last step: a monitor that was asked to, or a budget that is spent."""

from dataclasses import dataclass
from fractions import Fraction

from rlreason.config.evaluation import sampling_key
from rlreason.config.training import TrainingConfig
from rlreason.monitors.watch import Monitors
from rlreason.optimization import evaluation_due
from rlreason.progress.budget import seconds_ahead, spent
from rlreason.progress.step import Step, tokens_of
from rlreason.records.console import Console
from rlreason.records.counters import Counters


@dataclass
class Ends:
    """Says behind each step whether the run ends there.

    eval_problems, final_problems: how many problems an evaluation on the way asks, and the last one.
    """

    run: TrainingConfig
    monitors: Monitors
    counters: Counters
    n_steps: int
    eval_problems: int
    final_problems: int

    def recorded(self, step: Step) -> None:
        """A step is over, but for its evaluation: its seconds and tokens foretell those of the next one."""
        self.counters.step_ended(tokens_of(step.samples))

    def verdict(self, number: int, evaluates: bool) -> tuple[str, str]:
        """(status, reason) behind so many steps. `evaluates`: an evaluation is still due behind them."""
        status, reason = self.monitors.verdict()
        if status != "finished" or number >= self.n_steps:
            return status, reason
        row, pace = self.counters.row(), self.counters.pace
        ahead = seconds_ahead(pace, self.eval_problems if evaluates else 0, self.final_problems)
        reason = spent(self.run.budget, number, row["tokens/generated"], row["time/total"], pace, ahead)
        return ("budget", reason) if reason else ("finished", "")


def monitors_of(run: TrainingConfig, console: Console) -> Monitors:
    """The monitors of a run, which have said what its settings alone give reason to."""
    limit = sampling_key(run, "max_tokens")
    limits = () if limit == "sampling.max_tokens" else (limit,)  # what training cuts is said of its own samples
    group_size = getattr(run, "group_size", 1)
    monitors = Monitors(group_size, console.say, run.monitors, *limits)
    for name, warning in run.warnings().items():
        monitors.warn(0, name, warning)
    return monitors


def due(run: TrainingConfig, done: Fraction, width: Fraction, n_steps: int) -> bool:
    """Whether the settings ask for an evaluation behind the update that ends at `done` steps."""
    return evaluation_due(done, width, n_steps, run.eval_every, run.longest_without_evaluation)
