"""The training loop: sample, learn, hand over the weights, record, evaluate, write a checkpoint.

A run can be left at the end of a step, and nowhere else. A resumed run computes the steps after its newest checkpoint
again, with the same numbers: every seed follows from the number of the step.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from rlreason.engines.rollouts import training_work, with_missing_scores
from rlreason.evaluation.cases import failure_metrics
from rlreason.records.files import ROLLOUTS
from rlreason.runtime import signals
from rlreason.training.checkpoint import Resumable
from rlreason.training.progress import (
    LOST,
    averaged,
    budget_spent,
    interim_due,
    print_responses,
    profiled,
    sampling_metrics,
)
from rlreason.types import Collected


@dataclass
class Trainer(Resumable):
    """A training run: the loop over its steps."""

    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step of this process, 0 included

    def train(self) -> tuple[str, str]:
        """Run every step that is left, save the model, evaluate on the whole split; return (status, reason)."""
        console, n_steps = self.console, self.batches.n_steps
        if not self.records.checkpoint:
            self.clock.begin()
            self.evaluate()
            (before,) = self.validation.history
            self.metrics |= before.metrics
            shown = before.samples[: self.run.log_generations]
            print_responses(console, shown, self.components.eval_problems, self.components.graders.evaluation)
            console.start(n_steps)
            self.show()
        else:
            with console.wait("going on from the checkpoint"):
                self.restore()
            self.clock.begin()
            if not self.reason_to_stop():
                console.start(n_steps, self.steps_done)
                if self.evaluation_due():  # the last step has no interim evaluation, and n_steps was raised
                    self.evaluate()
        ending = self.reason_to_stop()
        while not ending:
            ending = self.run_step(self.steps_done + 1)
        self.save_model()
        if ending[0] != LOST:  # weights that are not finite answer nothing
            self.evaluate(last=True)  # which may trip a monitor
        if self.metrics:
            self.show(keep=True)
        return (self.monitors.reason_to_stop() or ending) if ending[0] == "finished" else ending

    def run_step(self, number: int) -> tuple[str, str] | None:
        """Run one training step; return (status, reason) if the run ends after it.

        A signal waits for the end of the step and for its checkpoint: `KeyboardInterrupt` leaves the `held` block.
        """
        with signals.held("stopping at the end of this step (a second signal ends the run at once)"):
            second = number == min(2, self.batches.n_steps)  # the first includes lazy loading
            with profiled(number, self.records, self.console) if self.run.profile and second else nullcontext():
                self.metrics = self.take_step(number)
            self.steps_done = number
            ending = self.reason_to_stop()
            if not ending and self.evaluation_due():
                self.evaluate()
                ending = self.reason_to_stop()
            if not ending:
                self.show()
            if ending or signals.stop_requested() or self.checkpoint_due():
                with self.waiting("writing a checkpoint", "checkpoint"):
                    self.write_checkpoint()
            if signals.stop_requested():
                self.save_model()
        return ending

    def take_step(self, number: int) -> dict[str, float]:
        """Sample, learn, give the engine the new weights, record; return the step's metrics."""
        parts, learner, clock, counters = self.components, self.learner, self.clock, self.counters
        collected = self.collect(number)
        samples, batches, sampled_by = collected.samples, collected.batches, self.engine.weight_version
        self.batches.sample_ahead(number)  # with these weights, while they are trained
        updates: list[dict[str, float]] = []
        sampled = row = collected.metrics | sampling_metrics(samples, sampled_by)
        spent = clock.spent("train")
        with self.waiting(f"step {number}: updates", "train"):
            # A generator: each turn of the loop takes an optimizer step (forward, loss, backward, clip, update), and
            # without batches none is taken.
            steps = learner.updates(collected, number, self.batches.n_steps, parts.sampling)
            for batch, update in zip(batches, steps, strict=False):
                self.console.part(f"{len(updates) + 1}/{len(batches)} done")
                before, spent = spent, clock.spent("train")
                clock.worked("train", training_work(batch, spent - before, learner.all_learn))
                counters.learned(update.metrics)
                row = update.metrics
                if not updates:  # which has measured entropies
                    measured = {id(s): entropy for s, entropy in zip(batch, update.entropies, strict=True)}
                    samples = [replace(s, entropy=measured.get(id(s))) if s.entropy is None else s for s in samples]
                    sampled = collected.metrics | sampling_metrics(samples, sampled_by)
                    row = row | sampled
                updates.append(update.metrics)
                if len(updates) < len(batches):
                    self.records.metrics(counters.row() | row)
            finite = not updates or learner.weights_are_finite()  # a GPU may still be at work
        with clock.phase("rollout"):
            self.batches.finish_ahead()  # samples drawn ahead keep the weights that they began with
        handing: dict[str, float] = {"train/moments_not_finite": len(learner.broken_moments())}
        if updates and finite:
            with self.waiting(f"step {number}: handing the weights to the engine", "weight_sync"):
                found = self.engine.load_weights(self.policy)
            handing |= clock.parts_of("weight_sync", found)
        self.records.metrics(counters.row() | row | handing)
        if samples and (every := self.run.save_rollouts_every) and number % every == 0:
            self.records.responses(ROLLOUTS, number, samples, parts.train_problems)
        metrics = averaged(updates) | sampled | handing
        self.monitors.check(number, metrics, updates, finite_weights=finite)
        for name, notice in collected.notices.items():
            self.monitors.warn(number, name, notice)
        self.monitors.check_grades(number, parts.graders.training.warnings([s.grade for s in samples]))
        counters.step_ended(sum(s.length for s in samples))
        return metrics

    def collect(self, number: int) -> Collected:
        """Sample, grade and score the responses of a step."""
        parts = self.components
        with self.console.wait(f"step {number}", parts.rollouts.progress_text), self.clock.phase("rollout"):
            collected = self.batches.collect(number)  # with rollout.async_level=1, most of it was done ahead
            with self.clock.phase("score"):
                truths = {problem.id: problem.answer for problem in parts.train_problems}
                signs = failure_metrics(collected.samples, truths, parts.graders.training, self.policy.tokenizer)
                by_learning = self.learner.will_score(collected, parts.sampling)
                collected = with_missing_scores(collected, parts.scorer, by_learning)
        self.counters.sampled(collected.samples)
        return replace(collected, metrics=collected.metrics | signs)

    def reason_to_stop(self) -> tuple[str, str] | None:
        """Return (status, reason) if the run ends here: by a monitor, after its last step, by its budget."""
        if stopped := self.monitors.reason_to_stop():
            return stopped
        if self.steps_done >= self.batches.n_steps:
            return "finished", ""
        counters, asked = self.counters, self.validation.problems_asked
        problems = asked(last=True) + (asked(last=False) if self.evaluation_due() else 0)
        spent = budget_spent(self.run.budget, self.steps_done, counters.row(), counters.pace, problems)
        return ("budget", spent) if spent else None

    def evaluation_due(self) -> bool:
        """Return whether an interim evaluation is due, and not done; after the last step comes the last one."""
        if self.steps_done >= self.batches.n_steps or self.validation.history[-1].step == self.steps_done:
            return False
        return interim_due(
            self.steps_done, self.batches.n_steps, self.run.eval_every, self.run.longest_without_evaluation
        )

    def evaluate(self, last: bool = False) -> None:
        """Evaluate the current weights on the interim problems, or the `last` time on the whole split."""
        self.validation.evaluate(self.steps_done, last)
        self.monitors.check(self.steps_done, {}, evaluations=[e.metrics for e in self.validation.history])

    def show(self, keep: bool = False) -> None:
        """Show the newest step's row on the console, where it stays if the step was evaluated."""
        newest = self.validation.history[-1]
        keep = keep or newest.step == self.steps_done
        self.console.step(self.steps_done, newest.metrics["eval/accuracy"], self.metrics, keep)
