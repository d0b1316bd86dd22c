"""The evaluations of a training run: the same problems on the way and at the end, where all the others join them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlreason.evaluation.accuracy import eval_metrics, evaluate
from rlreason.records.console import Console
from rlreason.records.counters import Counters
from rlreason.records.files import EVALS
from rlreason.records.monitors import Monitors
from rlreason.records.writer import RunWriter
from rlreason.setup.components import Components
from rlreason.types import Sample

FEWEST_LOST = 3  # n wrong of n exclude, at 95%, an accuracy above 3 / n


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation: the first sample of each problem asked on the way, in order, and the numbers of all samples."""

    samples: list[Sample]
    metrics: dict[str, float]
    final: dict[str, float]  # `final/...`, the same over the whole split; empty on the way


class Evaluator:
    """Evaluates, records, warns. `step`: how many steps are finished, for file names and warnings."""

    def __init__(
        self, components: Components, records: RunWriter, guards: Monitors, counters: Counters, console: Console
    ) -> None:
        self.components, self.records, self.guards = components, records, guards
        self.counters, self.console = counters, console
        self.history: list[Evaluated] = []

    def on_the_way(self, step: int, between_updates: bool = False) -> Evaluated:
        """Ask the problems that every evaluation asks."""
        return self._evaluate(step, update=self.counters.train_step if between_updates else None)

    def last(self, step: int) -> Evaluated:
        """Ask every problem; what is comparable with the evaluations before is told apart."""
        return self._evaluate(step, last=True)

    def _evaluate(self, step: int, update: int | None = None, last: bool = False) -> Evaluated:
        self.counters.pause()
        components, start = self.components, time.monotonic()
        examiner, n = components.examiner, components.examiner.settings.samples
        asked = components.final_problems if last else components.eval_problems
        name, again = ("last evaluation", False) if last else ("evaluation", bool(self.history))
        with self.console.wait(name, logged=again, more=components.drawn):
            everything, of_all = evaluate(examiner.rollouts, asked, examiner.sampling, examiner.measure, n)
        samples, metrics, final = everything, of_all, {}
        if last:
            places = {p.id: place for place, p in enumerate(asked)}
            samples = [s for p in components.eval_problems for s in everything[places[p.id] * n :][:n]]
            metrics = eval_metrics(samples, examiner.sampling)
            final = {name.replace("eval/", "final/"): value for name, value in of_all.items()}
        self.counters.eval_step += 1
        seconds = {"time/eval": time.monotonic() - start}
        self.records.metrics(self.counters.row() | metrics | final | seconds)
        self.records.responses(EVALS, step, everything, asked, update=update, prompts=components.prompts(everything))
        self.console.accuracy = metrics["eval/accuracy"]
        self.guards.look(step, of_all)
        self.guards.look_at_grades(step, examiner.warnings(everything), "in evaluation: ")
        self.history.append(Evaluated(samples[::n], metrics, final))
        return self.history[-1]

    def fell_to_zero(self) -> bool:
        return fell_to_zero([e.metrics for e in self.history])


def fell_to_zero(evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Whether the newest accuracy is 0 and excludes one that was measured before.

    None right of n excludes, at 95%, accuracies above 3 / n (the rule of three).

    >>> fell_to_zero([{"eval/accuracy": 0.25, "eval/problems": 16}, {"eval/accuracy": 0.0, "eval/problems": 16}])
    True
    >>> fell_to_zero([{"eval/accuracy": 0.0625, "eval/problems": 16}, {"eval/accuracy": 0.0, "eval/problems": 16}])
    False
    """
    *earlier, newest = evaluations
    best = max((e["eval/accuracy"] for e in earlier), default=0.0)
    return newest["eval/accuracy"] == 0 and best * newest["eval/problems"] >= FEWEST_LOST
