"""The loop: collect -> optimizer steps -> hand over weights -> evaluate -> record.

It knows the engine as `generate`, `load_weights`, `close`, and the grader as `grade_batch`; it is blind to how
an algorithm gives credit. The one function that is allowed to be long, so that a run can be read top to bottom.
"""

import time
from pathlib import Path

import torch

from rlreason.algorithms.feed import Feed
from rlreason.algorithms.rollouts import by_outcome
from rlreason.config.run import Run, Training
from rlreason.console import Console, Stopwatch
from rlreason.curves import draw_curves
from rlreason.errors import ConfigError
from rlreason.evaluation import evaluate, grading_failures, measured
from rlreason.guards import Guards
from rlreason.learner import Learner, averaged
from rlreason.narration import closing, header, objective_of, short_objective, shown_generations
from rlreason.records import Records, refuse_occupied
from rlreason.schedule import learning_rate_at
from rlreason.setup.algorithm import make_algorithm
from rlreason.setup.house import House, build
from rlreason.setup.learner import make_learner
from rlreason.setup.protocol import protocol_of
from rlreason.types import Sample


def train(run: Run, folder: Path, config: str) -> float:
    """Train as `run` says, leave everything in `folder`, return the final validation accuracy."""
    assert isinstance(run, Training)
    refuse_occupied(folder)
    console = Console()
    records = Records(folder, config)
    if records.set_aside:
        console.say(f"a broken-off run was here: its records are now in {records.set_aside}")
    card = objective_of(run)
    records.document("objective.md", card.markdown)
    house, feed = build(run, folder, console), None
    try:
        algorithm, learner = make_algorithm(run, house, console), make_learner(run, house.policy)
        console.n_steps = algorithm.n_steps
        if run.warmup_steps > algorithm.n_steps:
            raise ConfigError(
                f"warmup_steps={run.warmup_steps} is more than the run's {algorithm.n_steps} steps: lower it"
            )
        records.mirror = house.mirror
        header(console, run, house, folder)
        console.say("\n" + card.text)
        feed = Feed(algorithm, ahead=run.rollout.async_steps > 0)
        return loop(run, house, feed, learner, records, console)
    finally:
        house.close()  # first, so that what is being sampled ahead ends
        if feed is not None:
            feed.close()


def loop(run: Training, house: House, feed: Feed, learner: Learner, records: Records, console: Console) -> float:
    """Every step of a run, from the first evaluation to the closing table."""
    began = time.monotonic() - house.seconds_to_build
    guards = Guards(getattr(run, "group_size", 1), console.say, run.guards.parity, run.guards.parity_bound)

    def evaluated(step: int) -> tuple[list[Sample], dict[str, float]]:
        start = time.monotonic()
        samples, metrics = evaluate(house.rollouts, house.eval_problems, house.sampling, house.measure)
        records.metrics(
            {
                "eval_step": step,
                **metrics,
                "eval/grading_failures": grading_failures(house.grader.take_metrics()),
                "time/eval": time.monotonic() - start,
                "time/total": time.monotonic() - began,
            }
        )
        records.responses("evals", step, samples, house.eval_problems)
        console.accuracy = metrics["eval/accuracy"]
        guards.look(step, metrics)
        for warning in house.grader.warnings():
            guards.notice(step, "grader", f"in evaluation: {warning}")
        return samples, metrics

    before_samples, before = evaluated(0)
    shown_generations(console, before_samples, house.eval_problems, run.log_generations)
    console.start()
    console.step(0, {"reward/format": before["eval/format"], "rollout/length": before["eval/length"]}, keep=True)
    after_samples, after = before_samples, before
    # The gap to the engine can be measured where training scores the distribution that was sampled.
    gap_from = run.sampling.min_tokens if learner.temperature == run.sampling.temperature else None
    status = "finished"
    for step in range(1, feed.n_steps + 1):
        times = Stopwatch()
        collected = feed.take(step)
        times.lap("rollout")

        if unscored := [s for s in collected.samples if not s.kept]:  # the learner will measure the others
            measured(unscored, house.measure)
        if collected.restart:
            learner.restart()
        updates = []
        width = 1 / max(len(collected.batches), 1)
        for place, batch in enumerate(collected.batches):
            # Where each step starts anew, so does the schedule.
            before_this, total = (0, 1) if collected.restart else (step - 1, feed.n_steps)
            done = before_this + place * width
            rate = learning_rate_at(done, width, total, run.learning_rate, run.lr_schedule, run.warmup_steps)
            updates.append(learner.update(batch, rate, gap_from))
        times.lap("train")

        feed.wait()  # what is sampled ahead keeps the weights it began with
        if updates:
            house.engine.load_weights(house.policy)
        times.lap("sync")

        seen = by_outcome(collected.samples, "rollout") if collected.samples else {}
        metrics = collected.metrics | seen | averaged(updates) | house.engine.sync_metrics | house.grader.take_metrics()
        if collected.samples:
            versions = [s.response.weight_version for s in collected.samples]
            metrics["rollout/staleness"] = house.engine.weight_version - bool(updates) - sum(versions) / len(versions)
        records.metrics({"train_step": step, **metrics, **times.laps, "time/total": time.monotonic() - began})
        if collected.samples and run.save_rollouts_every and step % run.save_rollouts_every == 0:
            records.responses("rollouts", step, collected.samples, house.train_problems)
        guards.look(step, metrics)
        for name, notice in collected.notices.items():
            guards.notice(step, name, notice)
        for warning in house.grader.warnings():
            guards.notice(step, "grader", warning)

        if updates and metrics["train/skipped_updates"] == len(updates):
            status = f"diverged at step {step}: no optimizer step had a finite gradient"
        last = step == feed.n_steps or status != "finished"
        due = last or (run.eval_every and step % run.eval_every == 0)
        if due:
            after_samples, after = evaluated(step)
        console.step(step, metrics, keep=bool(due))
        if status != "finished":
            console.say(f"! {status}: lower learning_rate or max_grad_norm")
            break

    if run.save_model:
        house.policy.save(records.folder / "model")
    summary = {
        "status": status,
        "accuracy_before": before["eval/accuracy"],
        "accuracy": after["eval/accuracy"],
        "accuracy_interval": [after["eval/accuracy_low"], after["eval/accuracy_high"]],
        "length_before": before["eval/length"],
        "length": after["eval/length"],
        "eval_problems": len(house.eval_problems),
        "data": house.data_hash,
        "data_sizes": house.sizes,
        "protocol": protocol_of(run, house.eval_problems, 1),
        "notices": dict(guards.counts),
        "seconds": round(time.monotonic() - began, 1),
        "threads": torch.get_num_threads(),
    }
    draw_curves(records.folder, title=f"{run.model.name}, {run.data.name}: {short_objective(run)}, seed {run.seed}")
    records.summary(summary)
    closing(
        console, run, records.folder, (before_samples, before), (after_samples, after), house.eval_problems, summary
    )
    return float(after["eval/accuracy"])
