"""The loop: collect -> learn -> weight sync -> evaluate -> record."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import torch

from rlreason.algorithms.prefetch import RolloutPrefetcher
from rlreason.algorithms.rollouts import rollout_metrics, score_samples
from rlreason.config.evaluation import sampling_key
from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.evaluation.evaluator import Evaluated, Validation, fell_to_zero
from rlreason.grading.metrics import grading_metrics
from rlreason.interrupted import wind_up
from rlreason.learner import Learner, Update
from rlreason.objectives.card import TEXT_WIDTH
from rlreason.optimization import LearningRateSchedule, averaged, evaluation_due
from rlreason.records.console import Console, Stopwatch
from rlreason.records.counters import Counters
from rlreason.records.curves import draw_curves
from rlreason.records.files import OBJECTIVE, ROLLOUTS
from rlreason.records.monitors import Monitors
from rlreason.records.reader import RunFolder
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.setup.algorithm import make_algorithm
from rlreason.setup.components import Components, build_components
from rlreason.setup.learner import make_learner
from rlreason.setup.run_summary import closing, header, shown_generations, summed_up
from rlreason.types import Collected, Sample


def train(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Train as `run` says, leave everything in the folder of `records`, return the final validation accuracy."""
    assert isinstance(run, TrainingConfig)
    counters = Counters()
    counters.start()
    card = run.card()
    records.document(OBJECTIVE, card.markdown)
    components, prefetcher = build_components(run, records.folder, console), None
    try:
        algorithm, learner = make_algorithm(run, components, console), make_learner(run, components.policy)
        records.loggers = components.loggers
        header(console, run, components, records.folder, algorithm.n_steps)
        console.table("\n" + card.fitted(min(console.width, TEXT_WIDTH)))
        prefetcher = RolloutPrefetcher(algorithm, ahead=run.rollout.async_level > 0)
        return Trainer(run, components, prefetcher, learner, records, console, counters).loop()
    except BaseException as error:
        if signals.asked() is None and not isinstance(error, KeyboardInterrupt):
            raise
        stop = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
        far = wind_up(run, components, prefetcher, records, counters, console, signals.why_stopped(stop))
        raise type(stop)(f"{stop} {far}".strip()) from None
    finally:
        components.close()  # first, so that what is being sampled ahead ends
        if prefetcher is not None:
            prefetcher.close()
        components.loggers.abandon()  # where nothing has ended them, the run failed


@dataclass
class Step:
    """What one step of a run has collected and learned so far, and the numbers that are recorded of it."""

    number: int  # 1, 2, ...
    collected: Collected
    weight_version: int  # of the engine when all was sampled
    clock: Stopwatch
    updates: list[Update] = field(default_factory=list)
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the weight sync

    @property
    def count(self) -> int:
        """How many updates learn from what was collected."""
        return len(self.collected.batches)

    @cached_property
    def samples(self) -> list[Sample]:
        """What was sampled, with the entropies that the first update has measured. Ask when it is done."""
        if not self.updates:
            return self.collected.samples
        learned = zip(self.collected.batches[0], self.updates[0].entropies, strict=True)
        measured = {id(sample): entropy for sample, entropy in learned}
        return [replace(s, entropy=measured.get(id(s))) if s.entropy is None else s for s in self.collected.samples]

    @cached_property
    def sampled(self) -> dict[str, float]:
        """Metrics of what was sampled and how it was graded."""
        if not (samples := self.samples):
            return self.collected.metrics
        staleness = self.weight_version - sum(s.response.weight_version for s in samples) / len(samples)
        graded = grading_metrics([s.grade for s in samples])
        return self.collected.metrics | rollout_metrics(samples) | graded | {"rollout/staleness": staleness}

    def row(self) -> dict[str, float]:
        """The newest update; the first one's row has what was sampled for the step, and the last one's its times."""
        newest = self.updates[-1].metrics if self.updates else {}
        last = self.synced | self.clock.laps if len(self.updates) == self.count else {}
        return newest | (self.sampled if len(self.updates) < 2 else {}) | last

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The whole step in numbers. Ask when it is over."""
        return averaged([u.metrics for u in self.updates]) | self.sampled | self.synced | self.clock.laps


@dataclass
class Trainer:
    """A training run: its parts, and the loop over its steps."""

    run: TrainingConfig
    components: Components
    prefetcher: RolloutPrefetcher
    learner: Learner
    records: RunWriter
    console: Console
    counters: Counters

    def __post_init__(self) -> None:
        run, parts, records, counters, console = self.run, self.components, self.records, self.counters, self.console
        self.n_steps, self.policy, self.engine = self.prefetcher.n_steps, parts.policy, parts.engine
        self.schedule = LearningRateSchedule(run.learning_rate, run.lr_schedule, run.warmup_steps, self.n_steps)
        self.monitors = monitors_of(run, console)
        problems = parts.eval_problems, parts.final_problems
        self.validation = Validation(parts.evaluator, *problems, records, self.monitors, counters, console)

    def loop(self) -> float:
        """Every step of a run, from the first evaluation to the closing table; returns the final accuracy."""
        before = after = self.validation.evaluate(step=0)
        shown_generations(self.console, before.samples, self.components.eval_problems, self.run.log_generations)
        self.console.start(self.n_steps)
        self.console.step(0, self.validation.accuracy, before.metrics, keep=True)
        status, reason = self.monitors.verdict()
        for number in range(1, self.n_steps + 1):
            if status != "finished":
                break
            step = self.collect(number)
            self.learn(step)
            status, reason = diverged(step, self.learner)
            self.sync(step, status)
            self.record(step)
            if status == "finished":
                status, reason = self.monitors.verdict()

            last = number == self.n_steps or status != "finished"
            width = Fraction(1, 1 if self.prefetcher.ahead else max(step.count, 1))  # of the step's last update
            asked = not last and due(self.run, Fraction(number), width, self.n_steps)
            if asked or (last and status != "diverged:weights"):
                after = self.validation.evaluate(number, last)
            self.console.step(number, self.validation.accuracy, step.metrics, keep=last or asked)
        return self.finish(before, after, status, reason)

    def collect(self, number: int) -> Step:
        """Sample, grade, compute advantages; score what learning will not score under the weights that sampled."""
        self.counters.resume()
        clock = Stopwatch()
        with self.console.wait(f"step {number}", logged=True, more=self.components.rollouts.drawn):
            collected = self.prefetcher.next(number)
        self.counters.sampled(collected.samples)
        weight_version = self.engine.weight_version
        clock.lap("rollout")
        by_learning = self.learner.scores_by_learning(collected, self.components.sampling)
        unscored = [s for s in collected.samples if s.entropy is None and not (by_learning and s.has_loss)]
        if unscored:
            with self.console.wait(f"step {number}: measuring log-probabilities", logged=True):
                scored = score_samples(unscored, self.components.scorer)
            by_id = {id(sample): with_scores for sample, with_scores in zip(unscored, scored, strict=True)}
            collected = replace(collected, samples=[by_id.get(id(s), s) for s in collected.samples])
        return Step(number, collected, weight_version, clock)

    def learn(self, step: Step) -> None:
        """Take the step's updates; between two of them, an evaluation may be due."""
        sampling, counted = self.components.sampling, self.counters.learned
        updates = self.learner.learn(step.collected, step.number, self.schedule, sampling, counted)
        for update in self.console.each(f"step {step.number}: update", updates, step.count):
            step.updates.append(update)
            if len(step.updates) < step.count:
                self.records.metrics(self.counters.row() | step.row())
                done = step.number - 1 + Fraction(len(step.updates), step.count)
                if not self.prefetcher.ahead and due(self.run, done, Fraction(1, step.count), self.n_steps):
                    self.evaluate_within(step)
        step.clock.lap("train")

    def evaluate_within(self, step: Step) -> None:
        """Evaluate the weights as they are between two updates; the time is none of the step's."""
        step.clock.lap("train")
        self.engine.load_weights(self.policy)
        self.validation.evaluate(step.number - 1, between_updates=True)
        learned = averaged([update.metrics for update in step.updates])
        self.console.step(step.number, self.validation.accuracy, learned, keep=True)
        self.counters.resume()
        step.clock.skip()

    def sync(self, step: Step, status: str) -> None:
        """Hand the new weights to the engine; what is sampled ahead keeps those that it began with."""
        self.prefetcher.drain()
        if step.updates and status != "diverged:weights":
            with self.console.wait(f"step {step.number}: handing the weights to the engine", logged=True):
                step.synced = self.engine.load_weights(self.policy)
        step.clock.lap("sync")

    def record(self, step: Step) -> None:
        """Write down what the step has come to, and warn of what went wrong quietly in it."""
        number, samples = step.number, step.samples
        self.records.metrics(self.counters.row() | step.row())
        if samples and (every := self.run.save_rollouts_every) and number % every == 0:
            self.records.responses(ROLLOUTS, number, samples, self.components.train_problems)
        self.monitors.check(number, step.metrics)
        for name, notice in step.collected.notices.items():
            self.monitors.warn(number, name, notice)
        self.monitors.check_grades(number, self.components.grader.warnings([s.grade for s in samples]))

    def finish(self, before: Evaluated, after: Evaluated, status: str, reason: str) -> float:
        """Decide how the run ended, save the model, write the summary, draw the curves; returns the accuracy."""
        run, console, records, components = self.run, self.console, self.records, self.components
        self.counters.pause()
        if status == "finished":
            status, reason = self.monitors.verdict()
        if status == "finished" and fell_to_zero([e.metrics for e in self.validation.history]):
            status = "diverged:accuracy"
            reason = f"accuracy fell to 0 of {after.metrics['eval/problems']:.0f} problems, from one that this excludes"
        if status != "finished":
            cure = ": lower learning_rate or max_grad_norm" if status.startswith("diverged") else ""
            console.say(f"! {status}: {reason}{cure}")
        if run.save_model:
            with console.wait("saving the model"):
                self.policy.save(records.model)
        summary = summed_up(components, status, reason, before, after) | {
            "notices": dict(self.monitors.counts),
            **{name: round(value, 1) for name, value in self.counters.row().items()},
            "seconds": round(self.counters.row()["time/total"], 1),
            "threads": torch.get_num_threads(),
        }
        with console.wait("drawing the curves"):
            draw_curves(RunFolder(records.folder))
        with console.wait("closing the records"):
            records.summary(summary)
        closing(console, run, records.folder, before, after, components.eval_problems, summary, components.loggers)
        return float(summary["accuracy"])


def monitors_of(run: TrainingConfig, console: Console) -> Monitors:
    """The monitors of a run, which have said what its settings alone give reason to."""
    limit = sampling_key(run, "max_tokens")
    limits = () if limit == "sampling.max_tokens" else (limit,)  # what training cuts is said of its own samples
    group_size = getattr(run, "group_size", 1)
    monitors = Monitors(group_size, console.say, run.guards.parity, run.guards.parity_bound, *limits)
    for name, warning in run.warnings().items():
        monitors.warn(0, name, warning)
    return monitors


def due(run: TrainingConfig, done: Fraction, width: Fraction, n_steps: int) -> bool:
    """Whether the settings ask for an evaluation behind the update that ends at `done` steps."""
    return evaluation_due(done, width, n_steps, run.eval_every, run.longest_without_evaluation)


def diverged(step: Step, learner: Learner) -> tuple[str, str]:
    """(status, reason) after the updates of a step."""
    updates = [update.metrics for update in step.updates]
    if any(not math.isfinite(u.get("train/loss", 0.0)) for u in updates):
        return "diverged:loss", f"the loss of step {step.number} is no number"
    tried = [u for u in updates if not u["train/empty_updates"]]
    if tried and all(u["train/skipped_updates"] for u in tried):
        return "diverged:gradient", f"no update of step {step.number} had a finite gradient"
    if updates and not learner.weights_are_finite():
        return "diverged:weights", f"weights are no numbers after step {step.number}"
    return "finished", ""
