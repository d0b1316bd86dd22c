"""The training loop: sample, learn, hand over the weights, record, evaluate, write a checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.engines.rollouts import training_work, with_missing_scores
from rlreason.evaluation.cases import failure_metrics
from rlreason.evaluation.evaluator import Evaluated, Validation
from rlreason.evaluation.protocol import write_card
from rlreason.objectives.card import TEXT_WIDTH
from rlreason.records.console import Console
from rlreason.records.files import OBJECTIVE, ROLLOUTS, checkpoints_in, remove_moments
from rlreason.records.reader import RunFolder
from rlreason.records.rows import Counters
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import OTHER
from rlreason.runtime.signals import held
from rlreason.training.algorithms import RolloutPrefetcher
from rlreason.training.build import Components, build_components, measure_flops, start_loggers
from rlreason.training.build_algorithm import make_algorithm, make_learner
from rlreason.training.checkpoint import Checkpointer, Interruption
from rlreason.training.learner import Learner, LearningRateSchedule
from rlreason.training.progress import Profile, Step, StopRule, averaged, evaluation_due, make_monitors
from rlreason.training.summary import (
    LOST,
    course_summary,
    print_closing,
    print_generations,
    print_header,
    print_reason,
    run_facts,
    run_summary,
)
from rlreason.types import Update


def train(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Train `run`, record everything in the folder of `records`, and return the final validation accuracy."""
    assert isinstance(run, TrainingConfig)
    counters = Counters(clock=records.clock)
    components = build_components(run, records.folder, console, records.checkpoint is None, records.clock)
    interruption = Interruption(run, components, records, counters, console)
    trainer = learner = None
    try:
        algorithm = make_algorithm(run, components, console)
        learner = make_learner(run, components.policy, records.folder, algorithm)
        start_records(run, components, records, console)
        print_header(console, run, components, records.folder, algorithm.n_steps)
        card = run.card().with_head(str(components.policy.head_dtype).removeprefix("torch."))
        records.document(OBJECTIVE, card.markdown)
        console.table("\n" + card.fitted(min(console.width, TEXT_WIDTH)))
        prefetcher = RolloutPrefetcher(algorithm, ahead=run.rollout.async_level > 0, clock=records.clock)
        trainer = Trainer(run, components, prefetcher, learner, records, console, counters)
        interruption.checkpointer = trainer.checkpointer
        return trainer.loop()
    except BaseException as error:
        interruption.handle(error)
        raise
    finally:
        components.close()  # first: it ends the sampling ahead
        if trainer is not None:
            trainer.prefetcher.close()
        if learner is not None:
            learner.close()
        components.loggers.abandon()  # still open only if the run failed


def start_records(run: TrainingConfig, components: Components, records: RunWriter, console: Console) -> None:
    """Record what the run is made of; start the loggers of a resumed run, once its records are cut back."""
    records.loggers = components.loggers
    facts = run_facts(run, components)
    if run.save_model or run.checkpoint.every != 0:
        components.policy.try_saving()  # after the facts: saving completes the model's config
    if records.checkpoint is not None:
        start_loggers(run, components.loggers, records.folder, console, records.resume(facts, console.say))
    records.add_provenance(facts)


@dataclass
class Trainer:
    """A training run: its parts, and the loop over its steps.

    What a checkpoint keeps changes only in `held()` blocks, which no signal interrupts; each ends with
    `checkpointer.take_snapshot`.
    """

    run: TrainingConfig
    components: Components
    prefetcher: RolloutPrefetcher  # of the algorithm's batches, in turn or one step ahead
    learner: Learner
    records: RunWriter
    console: Console
    counters: Counters

    def __post_init__(self) -> None:
        run, components, records, console = self.run, self.components, self.records, self.console
        self.policy, self.engine, self.clock = components.policy, components.engine, self.counters.clock
        self.n_steps = self.prefetcher.n_steps
        self.schedule = LearningRateSchedule(run.learning_rate, run.lr_schedule, run.warmup_steps, self.n_steps)
        problems = components.eval_problems, components.final_problems
        self.monitors = make_monitors(run, console)
        self.validation = Validation(components.evaluator, *problems, records, self.monitors, self.counters, console)
        self.stop_rule = StopRule(run, self.monitors, self.counters, self.n_steps, *map(len, problems))
        self.checkpointer = Checkpointer(
            run.checkpoint, self.policy, self.engine, self.learner, self.prefetcher, components.graders(), records,
            self.counters, self.monitors, self.validation,
        )  # fmt: skip
        self.position = self.checkpointer.position
        self.profile = Profile(run.profile, records, console, self.n_steps)
        measure_flops(self.clock, self.policy, self.learner.world)

    def loop(self) -> float:
        """Run every step that is left, evaluate on the whole split, save the model; return the final accuracy."""
        self.begin()
        while not self.over:
            self.run_step(self.position.finished + 1)
        self.evaluate_last(self.position.finished)
        return self.finish()

    @property
    def over(self) -> bool:
        """Whether no step is left, or something has ended the run early and its last step is complete."""
        position = self.position
        return position.finished >= self.n_steps or (position.ended and position.step is None)

    def begin(self) -> None:
        """Evaluate the start weights, or restore the checkpoint to resume from."""
        checkpoint, position = self.records.checkpoint, self.position
        if checkpoint is None:
            self.clock.begin()
            before = self.evaluate(0)
            print_generations(self.console, before.samples, self.components.eval_problems, self.run.log_generations)
        else:
            with self.console.wait("going on from the checkpoint"):
                self.checkpointer.restore(checkpoint)
            self.clock.begin()
        begun = position.finished + (position.step is not None)
        position.status, position.reason = self.stop_rule.verdict(begun, evaluates=False)  # by the current settings
        if self.over:
            return
        self.console.start(self.n_steps, position.finished)
        if checkpoint is None:
            self.console.step(0, self.validation.accuracy, before.metrics, keep=True)

    def run_step(self, number: int) -> None:
        """Run one training step, with the evaluation and the checkpoint that are due after it.

        A resumed run skips what the step had already done.
        """
        position = self.position
        with self.profile.of(number):
            step = position.step or self.collect(number)
            self.learn(step)
            if not position.recorded:
                self.sync(step)
                self.record(step)
        last = number == self.n_steps or position.ended
        evaluates = not last and self.evaluation_due(step)
        if evaluates and position.evaluated != number:
            self.evaluate(number)
            last = position.ended
        if last:
            self.checkpoint()
            self.evaluate_last(number)
        self.console.step(number, self.validation.accuracy, step.metrics, keep=last or evaluates)
        with held():
            position.finished, position.step, position.rows, position.recorded = number, None, 0, False
            self.checkpointer.take_snapshot(drawn=True)
        if not last and self.checkpointer.due():
            self.checkpoint()

    def collect(self, number: int) -> Step:
        """Sample, grade, compute advantages; score under the sampling weights what the first update will not score."""
        with self.waiting(f"step {number}", "rollout", self.components.rollouts.progress_text):
            collected = self.prefetcher.next(number)
            parts = self.components
            signs = failure_metrics(collected.samples, parts.truths, parts.grader, self.policy.tokenizer)
            collected = replace(collected, metrics=collected.metrics | signs)
        weight_version = self.engine.weight_version
        by_learning = self.learner.scores_by_learning(collected, self.components.sampling)
        with self.waiting(f"step {number}: measuring log-probabilities", "score"):
            scored = with_missing_scores(collected, self.components.scorer, by_learning)
        with held():
            self.counters.sampled(collected.samples)
            self.position.step = step = Step(number, scored, weight_version)
            self.prefetcher.start_next(number)
            self.checkpointer.take_snapshot(drawn=True)
        return step

    def learn(self, step: Step) -> None:
        """Take the step's optimizer updates, with the rows and evaluations due between them."""
        taken, sampling, objective = len(step.updates), self.components.sampling, self.learner.objective
        all_learn = bool(objective.kl_coef_of_loss or objective.entropy_coef)
        spent = self.clock.spent("train")

        def count(update: Update) -> None:
            nonlocal spent
            before, spent = spent, self.clock.spent("train")
            batch = step.collected.batches[len(step.updates)]
            self.clock.worked("train", training_work(batch, spent - before, all_learn))
            self.counters.learned(update.metrics)
            step.updates.append(update)
            self.checkpointer.take_snapshot()

        if taken and not self.position.recorded:  # by the run before it was interrupted
            self.between_updates(step)
        updates = self.learner.learn(step.collected, step.number, self.schedule, sampling, count, taken)
        with self.clock.phase("train"):
            for _ in self.console.each(f"step {step.number}: update", updates, step.count, taken):
                with self.clock.phase(OTHER):
                    self.between_updates(step)

    def between_updates(self, step: Step) -> None:
        """Write an update's row, and evaluate if that is due; the step's last update has its row from `record`."""
        taken = len(step.updates)
        if taken == step.count:
            return
        if self.position.rows < taken:
            with held():
                self.records.metrics(self.counters.row() | step.row())
                self.position.rows = taken
                self.checkpointer.take_snapshot()
        done = step.number - 1 + Fraction(taken, step.count)
        if not self.prefetcher.ahead and self.evaluation_due(step, done) and self.position.evaluated != done:
            with self.clock.phase("weight_sync"):
                self.engine.load_weights(self.policy)
            self.evaluate(done, between_updates=True)
            learned = averaged([update.metrics for update in step.updates])
            self.console.step(step.number, self.validation.accuracy, learned, keep=True)

    def sync(self, step: Step) -> None:
        """Hand the new weights to the engine, if they are finite; samples drawn ahead keep those they began with."""
        with self.clock.phase("train"):  # a GPU may still be at work on the update
            step.finite = not step.updates or self.learner.weights_are_finite()
        with self.clock.phase("rollout"):
            self.prefetcher.drain()
        if step.updates and step.finite:
            with self.waiting(f"step {step.number}: handing the weights to the engine", "weight_sync"):
                synced = self.engine.load_weights(self.policy)
            step.synced = self.clock.parts_of("weight_sync", synced)
        step.synced["train/moments_not_finite"] = self.learner.moments_not_finite()

    def record(self, step: Step) -> None:
        """Write the step's row and samples, run the monitors, and decide whether the run ends here."""
        number, samples = step.number, step.samples
        with held():
            self.records.metrics(self.counters.row() | step.row())
            if samples and (every := self.run.save_rollouts_every) and number % every == 0:
                self.records.responses(ROLLOUTS, number, samples, self.components.train_problems)
            self.monitors.check(number, step.metrics, [u.metrics for u in step.updates], finite_weights=step.finite)
            for name, notice in step.collected.notices.items():
                self.monitors.warn(number, name, notice)
            self.monitors.check_grades(number, self.components.grader.warnings([s.grade for s in samples]))
            self.counters.step_ended(sum(len(s.response.token_ids) for s in samples))
            self.position.status, self.position.reason = self.stop_rule.verdict(number, self.evaluation_due(step))
            self.position.recorded = True
            self.checkpointer.take_snapshot()

    def evaluation_due(self, step: Step, done: Fraction | None = None) -> bool:
        """Return whether an evaluation is due after the step, or after its update that ends at `done` steps."""
        width = Fraction(1, 1 if self.prefetcher.ahead else max(step.count, 1))  # of one update
        at = Fraction(step.number) if done is None else done
        return evaluation_due(at, width, self.n_steps, self.run.eval_every, self.run.longest_without_evaluation)

    def evaluate(self, done: int | Fraction, last: bool = False, between_updates: bool = False) -> Evaluated:
        """Evaluate the weights after `done` steps, record the result, and let the monitors check it."""
        step = int(done)
        measured = self.validation.measure(step, last)
        with held():
            evaluated = self.validation.record(measured, step, between_updates)
            self.position.evaluated = Fraction(done)
            self.monitors.check(step, {}, evaluations=[e.metrics for e in self.validation.history])
            if not self.position.ended:
                self.position.status, self.position.reason = self.monitors.verdict()
            self.checkpointer.take_snapshot(drawn=True)
        return evaluated

    def evaluate_last(self, number: int) -> None:
        """Evaluate on the whole split after the last step, unless that is done or the weights are not finite."""
        again = self.position.evaluated == number  # by a due evaluation that ended the run, or no step was left
        if self.position.status != LOST and not (again and self.validation.history[-1].last):
            self.evaluate(number, last=True, between_updates=again)

    def checkpoint(self) -> None:
        """Write a checkpoint, unless checkpoint.every=0."""
        if self.run.checkpoint.every == 0:
            return
        with self.waiting("writing a checkpoint", "checkpoint"):
            self.checkpointer.write()

    def finish(self) -> float:
        """Save the model, draw the curves, write the summary and print the closing table; return the accuracy."""
        run, console, records, components = self.run, self.console, self.records, self.components
        status, reason, history = self.position.status, self.position.reason, self.validation.history
        print_reason(console, records.folder, status, reason)
        if run.save_model:
            with self.waiting("saving the model", "checkpoint", logged=False):
                self.checkpointer.save_model()
        with self.waiting("drawing the curves", "record", logged=False):
            draw_curves(RunFolder(records.folder))
        self.checkpointer.prune(keep=1)  # one is enough to train for more steps
        summary = run_summary(components, status, reason, history[0], history[-1]) | {
            **course_summary(self.monitors, self.counters),
            "checkpoints": self.checkpointer.leaves(status),
        }
        with console.wait("closing the records"):
            write_card(run.eval.card, records.folder, summary)
            records.summary(summary)
            if summary["checkpoints"]["moments_removed"]:
                for path in checkpoints_in(records.folder):  # after the summary: the finished run cannot be resumed
                    remove_moments(path)
        print_closing(console, run, components, records.folder, history, summary)
        return float(summary["accuracy"])

    @contextmanager
    def waiting(self, what: str, phase: str, more: Callable[[], str] = str, logged: bool = True) -> Iterator[None]:
        """Show `what` on the console, and time this block as `phase`."""
        with self.console.wait(what, logged, more), self.clock.phase(phase):
            yield
