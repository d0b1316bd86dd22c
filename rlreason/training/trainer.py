"""The training loop: sample, learn, hand over the weights, record, evaluate, write a checkpoint.

A run can be left at the end of a step, and nowhere else. A resumed run computes the steps after its newest checkpoint
again, with the same numbers: every seed follows from the number of the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

from rlreason.config.training import TrainingConfig
from rlreason.engines.rollouts import training_work
from rlreason.evaluation.evaluator import Validation
from rlreason.health.watch import Monitors
from rlreason.records.console import Console
from rlreason.records.files import ROLLOUTS
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.training.algorithms import Batches
from rlreason.training.build import Components
from rlreason.training.checkpoint import Checkpoints
from rlreason.training.learner import Learner
from rlreason.training.progress import LOST, Step, budget_spent, interim_due, print_responses, profiled, with_scores


@dataclass
class Trainer:
    """A training run: its parts, and the loop over its steps."""

    run: TrainingConfig
    components: Components  # policy, engine, rollouts, graders, problems
    batches: Batches  # of the algorithm
    learner: Learner
    schedule: Callable[..., float]  # the rate of an update, from its place in the run
    records: RunWriter
    counters: Counters
    monitors: Monitors
    validation: Validation
    checkpoints: Checkpoints
    console: Console
    steps_done: int = 0
    step: Step | None = None  # the newest of this process

    def __post_init__(self) -> None:
        self.n_steps, self.clock = self.batches.n_steps, self.counters.clock
        self.policy, self.engine = self.components.policy, self.components.engine

    def train(self) -> tuple[str, str]:
        """Run every step that is left, save the model, evaluate on the whole split; return (status, reason)."""
        if self.records.checkpoint is None:
            self.start()
        else:
            self.resume()
        ending = self.reason_to_stop()
        while ending is None:
            ending = self.run_step(self.steps_done + 1)
        self.save_model()
        if ending[0] != LOST:  # weights that are not finite answer nothing
            self.evaluate(last=True)  # which may trip a monitor
        if self.step is not None:
            self.show(self.step, keep=True)
        return (self.monitors.reason_to_stop() or ending) if ending[0] == "finished" else ending

    def start(self) -> None:
        """Evaluate the start weights."""
        self.clock.begin()
        self.evaluate()
        (before,) = self.validation.history
        shown = before.samples[: self.run.log_generations]
        print_responses(self.console, shown, self.components.eval_problems, self.components.graders.evaluation)
        self.console.start(self.n_steps)
        self.console.step(0, before.metrics["eval/accuracy"], before.metrics, keep=True)

    def resume(self) -> None:
        """Restore the newest checkpoint."""
        with self.console.wait("going on from the checkpoint"):
            self.steps_done = self.checkpoints.restore()
        self.clock.begin()
        if self.reason_to_stop() is None:
            self.console.start(self.n_steps, self.steps_done)
            if self.evaluation_due():  # this was the last step, which has no interim evaluation, and n_steps was raised
                self.evaluate()

    def run_step(self, number: int) -> tuple[str, str] | None:
        """Run one training step; return (status, reason) if the run ends after it.

        A signal waits for the end of the step and for its checkpoint: `KeyboardInterrupt` leaves the `held` block.
        """
        with signals.held("stopping at the end of this step (a second signal ends the run at once)"):
            second = number == min(2, self.n_steps)  # the first includes lazy loading
            with profiled(number, self.records, self.console) if self.run.profile and second else nullcontext():
                self.step = step = self.sample(number)
                self.learn(step)
                self.hand_over_weights(step)
                self.record(step)
            self.steps_done = number
            ending = self.reason_to_stop()
            if ending is None and self.evaluation_due():
                self.evaluate()
                ending = self.reason_to_stop()
            if ending is None:
                self.show(step)
            if ending is not None or signals.stop_requested() or self.checkpoints.due(number):
                with self.waiting("writing a checkpoint", "checkpoint"):
                    self.checkpoints.write(number)
            if signals.stop_requested():
                self.save_model()
        return ending

    def sample(self, number: int) -> Step:
        """Sample, grade, score, compute advantages; with rollout.async_level=1, most of it was done ahead."""
        with self.waiting(f"step {number}", "rollout", self.components.rollouts.progress_text):
            collected = self.batches.collect(number)
            with self.clock.phase("score"):
                collected = with_scores(self.components, self.learner, collected)
        self.counters.sampled(collected.samples)
        return Step(number, collected, self.engine.weight_version)  # each response has that which sampled it

    def learn(self, step: Step) -> None:
        """Take the step's optimizer updates. Write the row of each but the last, which `record` writes."""
        self.batches.sample_ahead(step.number)  # with these weights, while they are trained
        spent = self.clock.spent("train")
        updates = self.learner.updates(step.collected, step.number, self.schedule, self.components.sampling)
        with self.waiting(f"step {step.number}: updates", "train"):
            # each is taken as the loop comes to it: forward, loss, backward, clip, optimizer
            for update in islice(updates, step.count):  # a step without batches does not even restart
                self.console.part(f"{len(step.updates) + 1}/{step.count} done")
                before, spent = spent, self.clock.spent("train")
                batch = step.collected.batches[len(step.updates)]
                self.clock.worked("train", training_work(batch, spent - before, self.learner.all_learn))
                self.counters.learned(update.metrics)
                step.updates.append(update)
                if len(step.updates) < step.count:
                    self.records.metrics(self.counters.row() | step.row())
            step.finite = not step.updates or self.learner.weights_are_finite()  # a GPU may still be at work

    def hand_over_weights(self, step: Step) -> None:
        """Give the engine the new weights, if they are finite; samples drawn ahead keep those they began with."""
        with self.clock.phase("rollout"):
            self.batches.finish_ahead()
        if step.updates and step.finite:
            with self.waiting(f"step {step.number}: handing the weights to the engine", "weight_sync"):
                metrics = self.engine.load_weights(self.policy)
            step.sync_metrics = self.clock.parts_of("weight_sync", metrics)
        step.sync_metrics["train/moments_not_finite"] = len(self.learner.broken_moments())

    def record(self, step: Step) -> None:
        """Write the step's last row and its responses, and run the monitors."""
        number, samples, monitors = step.number, step.samples, self.monitors
        self.records.metrics(self.counters.row() | step.row())
        if samples and (every := self.run.save_rollouts_every) and number % every == 0:
            self.records.responses(ROLLOUTS, number, samples, self.components.train_problems)
        monitors.check(number, step.metrics, [u.metrics for u in step.updates], finite_weights=step.finite)
        for name, notice in step.collected.notices.items():
            monitors.warn(number, name, notice)
        monitors.check_grades(number, self.components.graders.training.warnings([s.grade for s in samples]))
        self.counters.step_ended(sum(s.length for s in samples))

    def reason_to_stop(self) -> tuple[str, str] | None:
        """Return (status, reason) if the run ends here: by a monitor, after its last step, by its budget."""
        if (stopped := self.monitors.reason_to_stop()) is not None:
            return stopped
        if self.steps_done >= self.n_steps:
            return "finished", ""
        parts, counters = self.components, self.counters
        problems = len(parts.final_problems) + (len(parts.eval_problems) if self.evaluation_due() else 0)
        spent = budget_spent(self.run.budget, self.steps_done, counters.row(), counters.pace, problems)
        return ("budget", spent) if spent else None

    def evaluation_due(self) -> bool:
        """Return whether an interim evaluation is due, and not done; after the last step comes the last one."""
        if self.steps_done >= self.n_steps or self.validation.history[-1].step == self.steps_done:
            return False
        return interim_due(self.steps_done, self.n_steps, self.run.eval_every, self.run.longest_without_evaluation)

    def evaluate(self, last: bool = False) -> None:
        """Evaluate the current weights on the interim problems, or the `last` time on the whole split."""
        self.validation.evaluate(self.steps_done, last)
        self.monitors.check(self.steps_done, {}, evaluations=[e.metrics for e in self.validation.history])

    def show(self, step: Step, keep: bool = False) -> None:
        """Show the step's row on the console, where it stays if the step was evaluated."""
        newest = self.validation.history[-1]
        keep = keep or newest.step == step.number
        self.console.step(step.number, newest.metrics["eval/accuracy"], step.metrics, keep)

    def save_model(self) -> None:
        """Save the model, if that is wanted."""
        if self.run.save_model:
            with self.waiting("saving the model", "checkpoint"):
                self.checkpoints.save_model(self.steps_done)

    @contextmanager
    def waiting(self, what: str, phase: str, more: Callable[[], str] = str) -> Iterator[None]:
        """Show `what` on the console, and time this block as `phase`."""
        with self.console.wait(what, more), self.clock.phase(phase):
            yield
