"""The loop: collect -> optimizer steps -> hand over weights -> evaluate -> record.

It knows the engine as `generate`, `load_weights`, `close`, and the grader as `grade_batch`; it is blind to how
an algorithm gives credit. The one function that is allowed to be long, so that a run can be read top to bottom.
"""

import random
import time
from pathlib import Path

import torch

from rlreason.algorithms.rollouts import rollout_metrics
from rlreason.config.grpo import GRPO
from rlreason.config.run import Run
from rlreason.console import Console, Stopwatch
from rlreason.curves import draw_curves
from rlreason.evaluation import evaluate, grading_failures
from rlreason.guards import Guards
from rlreason.learner import averaged
from rlreason.narration import closing, header
from rlreason.objectives.card import objective_card
from rlreason.records import Records, refuse_occupied
from rlreason.setup.house import House, build
from rlreason.types import Sample


def train(run: Run, folder: Path, config: str) -> float:
    """Train as `run` says, leave everything in `folder`, return the final validation accuracy."""
    assert isinstance(run, GRPO)
    refuse_occupied(folder)
    console = Console(run.n_steps)
    records = Records(folder, config)
    if records.set_aside:
        console.say(f"a broken-off run was here: its records are now in {records.set_aside}")
    card = objective_card(run.settings())
    records.document("objective.md", card.markdown)
    house = build(run, folder, console)
    try:
        records.mirror = house.mirror
        sizes = len(house.train_problems), len(house.eval_problems)
        header(console, run, house.policy.describe(), sizes, folder, house.seconds_to_build)
        console.say("\n" + card.text)
        return loop(run, house, records, console)
    finally:
        house.close()


def loop(run: GRPO, house: House, records: Records, console: Console) -> float:
    """Every step of a run, from the first evaluation to the closing table."""
    began = time.monotonic() - house.seconds_to_build
    guards = Guards(run.group_size, console.say)

    def evaluated(step: int) -> tuple[list[Sample], dict[str, float]]:
        start = time.monotonic()
        samples, metrics = evaluate(house.rollouts, house.eval_problems, house.eval_sampling)
        row = {
            "eval_step": step,
            **metrics,
            "eval/grading_failures": grading_failures(house.grader.take_metrics()),
            "time/eval": time.monotonic() - start,
            "time/total": time.monotonic() - began,
        }
        records.metrics(row)
        records.responses("evals", step, samples, house.eval_problems)
        console.accuracy = metrics["eval/accuracy"]
        for warning in house.grader.warnings():
            guards.notice(step, "grader", f"in evaluation: {warning}")
        return samples, metrics

    before_samples, before = evaluated(0)
    console.start()
    console.step(0, {"reward/format": before["eval/format"], "rollout/length": before["eval/length"]}, keep=True)
    after_samples, after = before_samples, before
    status = "finished"
    for step in range(1, run.n_steps + 1):
        times = Stopwatch()
        samples = house.algorithm.collect(step)
        times.lap("rollout")

        # The behaviour policy is fixed once per rollout batch, before any weight moves. With a single optimizer
        # step nothing has moved when it is needed, and the learner takes its own numbers.
        if run.updates_per_rollout > 1:
            pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
            scores = house.policy.score(pairs, run.sampling.temperature, run.micro_batch_tokens)
            for sample, score in zip(samples, scores, strict=True):
                sample.old_log_probs = score
        times.lap("old_log_probs")

        updates = []
        for epoch in range(run.epochs_per_rollout):
            for chunk in train_batches(samples, run, step, epoch):
                updates.append(house.learner.update(chunk, gap_from=run.sampling.min_tokens))
        times.lap("train")

        house.engine.load_weights(house.policy)
        times.lap("sync")

        metrics = (
            rollout_metrics(samples)
            | {"rollout/kept": sum(s.kept for s in samples) / len(samples)}
            | averaged(updates)
            | house.grader.take_metrics()
        )
        row = {"train_step": step, **metrics, **times.laps, "time/total": time.monotonic() - began}
        records.metrics(row)
        if run.save_rollouts_every and step % run.save_rollouts_every == 0:
            records.responses("rollouts", step, samples, house.train_problems)
        guards.look(step, metrics)
        for warning in house.grader.warnings():
            guards.notice(step, "grader", warning)

        if metrics["train/skipped_updates"] == len(updates):
            status = f"diverged at step {step}: no optimizer step had a finite gradient"
        last = step == run.n_steps or status != "finished"
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
        "notices": dict(guards.counts),
        "seconds": round(time.monotonic() - began, 1),
        "threads": torch.get_num_threads(),
    }
    draw_curves(records.folder, title=f"{run.model.name}, {run.data.name}: loss={run.loss.loss_type}, seed {run.seed}")
    records.summary(summary)
    closing(
        console, run, records.folder, (before_samples, before), (after_samples, after), house.eval_problems, summary
    )
    return float(after["eval/accuracy"])


def train_batches(samples: list[Sample], run: GRPO, step: int, epoch: int) -> list[list[Sample]]:
    """The batch cut into optimizer steps; shuffled anew each epoch when there is more than one step."""
    size = run.train_batch_size
    if size == len(samples):
        return [samples]
    order = list(samples)
    random.Random(f"{run.seed}/batches/{step}/{epoch}").shuffle(order)
    return [order[i : i + size] for i in range(0, len(order), size)]
