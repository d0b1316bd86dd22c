"""The loop: collect -> optimizer steps -> hand over weights -> evaluate -> record.

It knows the engine as `generate`, `load_weights`, `close`, and the grader as `grade_batch`; it is blind to how
an algorithm gives credit. The one function that is allowed to be long, so that a run can be read top to bottom.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from rlreason.algorithms.base import Collected
from rlreason.algorithms.prefetch import RolloutPrefetcher
from rlreason.algorithms.rollouts import rollout_metrics, score_samples
from rlreason.config.evaluation import sampling_key
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.store import schemas_of
from rlreason.evaluation.accuracy import more_accuracies
from rlreason.evaluation.evaluator import Evaluated, Evaluator
from rlreason.grading.metrics import grading_metrics
from rlreason.interrupted import wind_up
from rlreason.learner import Learner, averaged
from rlreason.objectives.card import TEXT_WIDTH
from rlreason.optimization import evaluation_due, learning_rate_at
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
from rlreason.setup.protocol import protocol_of
from rlreason.setup.run_summary import closing, header, objective_of, shown_generations


def train(run: RunConfig, folder: Path, config: str) -> float:
    """Train as `run` says, leave everything in `folder`, return the final validation accuracy."""
    assert isinstance(run, TrainingConfig)
    console, counters = Console(), Counters()
    counters.start()
    records = RunWriter(folder, config, schemas=schemas_of(run), say=console.say)
    card = objective_of(run)
    records.document(OBJECTIVE, card.markdown)
    components, feed = build_components(run, folder, console), None
    try:
        algorithm, learner = make_algorithm(run, components, console), make_learner(run, components.policy)
        console.n_steps = algorithm.n_steps
        records.mirror = components.mirror
        header(console, run, components, folder)
        console.table("\n" + card.fitted(min(console.width, TEXT_WIDTH)))
        feed = RolloutPrefetcher(algorithm, ahead=run.rollout.async_steps > 0)
        return loop(run, components, feed, learner, records, console, counters)
    except BaseException as error:
        if signals.asked() is None and not isinstance(error, KeyboardInterrupt):
            raise
        stop = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
        far = wind_up(run, components, feed, records, counters, console, signals.why_stopped(stop))
        raise type(stop)(f"{stop} {far}".strip()) from None
    finally:
        components.close()  # first, so that what is being sampled ahead ends
        if feed is not None:
            feed.close()


def loop(
    run: TrainingConfig,
    components: Components,
    feed: RolloutPrefetcher,
    learner: Learner,
    records: RunWriter,
    console: Console,
    counters: Counters,
) -> float:
    """Every step of a run, from the first evaluation to the closing table."""
    limit = sampling_key(run, "max_tokens")
    limits = () if limit == "sampling.max_tokens" else (limit,)  # what training cuts is said of its own samples
    guards = Monitors(getattr(run, "group_size", 1), console.say, run.guards.parity, run.guards.parity_bound, *limits)
    for name, warning in run.warnings().items():
        guards.notice(0, name, warning)
    validation = Evaluator(components, records, guards, counters, console)
    before = after = validation.on_the_way(0)
    shown_generations(console, before.samples, components.eval_problems, run.log_generations)
    console.start()
    opening = {"reward/format": before.metrics["eval/format"], "rollout/length": before.metrics["eval/length"]}
    console.step(0, opening, keep=True)
    # The gap to the engine can be measured where training scores the distribution that was sampled.
    same_temperature = learner.temperature == run.sampling.temperature
    status, reason = guards.verdict()
    synced: dict[str, float] = {}  # of the newest weight sync
    for step in range(1, feed.n_steps + 1 if status == "finished" else 1):
        counters.resume()
        times = Stopwatch()
        with console.wait(f"step {step}", logged=True, more=components.drawn):
            collected = feed.take(step)
        counters.sampled(collected.samples)
        held = components.engine.weight_version
        times.lap("rollout")

        # The weights that sampled, at one temperature. A single update measures what it learns from on its way.
        alone = len(collected.batches) == 1 and same_temperature and not collected.restart
        if unseen := [s for s in collected.samples if s.entropy is None and not (alone and s.kept)]:
            with console.wait(f"step {step}: measuring log-probabilities", logged=True):
                score_samples(unseen, components.measure)
        if collected.restart:
            learner.restart()
        updates, of_step = list[dict[str, float]](), collected.metrics
        count = len(collected.batches)
        for place, batch in enumerate(collected.batches):
            # Where each step starts anew, so does the schedule.
            steps_before, total = (0, 1) if collected.restart else (step - 1, feed.n_steps)
            done = steps_before + place / count
            rate = learning_rate_at(done, 1 / count, total, run.learning_rate, run.lr_schedule, run.warmup_steps)
            holds = same_temperature and place == 0 and not collected.restart  # the weights that sampled
            gap_from = run.sampling.min_tokens if holds else None
            with console.wait(f"step {step}: update {place + 1}/{count}", logged=True):
                update = learner.update(batch, rate, gap_from, counters.learned)
            updates.append(update)
            if place == 0:  # the row of the first update tells what was sampled for the step, the last one's its times
                of_step |= sampled(collected, held)
            if place + 1 < count:
                records.metrics(counters.row() | update | (of_step if place == 0 else {}))
                at = step - 1 + Fraction(place + 1, count)
                if not feed.ahead and due(run, at, Fraction(1, count), feed.n_steps):
                    times.lap("train")
                    components.engine.load_weights(components.policy)
                    validation.on_the_way(step - 1, between_updates=True)
                    console.step(step, averaged(updates), keep=True)
                    counters.resume()
                    times.skip()
        times.lap("train")
        status, reason = verdict(step, updates, learner)
        feed.wait()  # what is sampled ahead keeps the weights it began with
        if updates and status != "diverged:weights":
            with console.wait(f"step {step}: handing the weights to the engine", logged=True):
                synced = components.engine.load_weights(components.policy)
        times.lap("sync")

        if not updates:
            of_step |= sampled(collected, held)
        seconds = synced | times.laps
        records.metrics(counters.row() | (updates[-1] if updates else {}) | (of_step if count < 2 else {}) | seconds)
        if collected.samples and run.save_rollouts_every and step % run.save_rollouts_every == 0:
            records.responses(ROLLOUTS, step, collected.samples, components.train_problems)
        metrics = averaged(updates) | of_step | seconds
        guards.look(step, metrics)
        for name, notice in collected.notices.items():
            guards.notice(step, name, notice)
        guards.look_at_grades(step, components.grader.warnings([s.grade for s in collected.samples]))
        if status == "finished":
            status, reason = guards.verdict()

        last = step == feed.n_steps or status != "finished"
        if last and status != "diverged:weights":
            after = validation.last(step)
        elif asked_now := not last and due(
            run, Fraction(step), Fraction(1, 1 if feed.ahead else max(count, 1)), feed.n_steps
        ):
            after = validation.on_the_way(step)
        console.step(step, metrics, keep=last or asked_now)
        if last:
            break

    counters.pause()
    if status == "finished":
        status, reason = guards.verdict()
    if status == "finished" and validation.fell_to_zero():
        status = "diverged:accuracy"
        reason = f"accuracy fell to 0 of {after.metrics['eval/problems']:.0f} problems, from one that this excludes"
    if status != "finished":
        cure = ": lower learning_rate or max_grad_norm" if status.startswith("diverged") else ""
        console.say(f"! {status}: {reason}{cure}")
    if run.save_model:
        with console.wait("saving the model"):
            components.policy.save(records.model)
    summary = summed_up(run, components, status, reason, before, after) | {
        "notices": dict(guards.counts),
        **{name: round(value, 1) for name, value in counters.row().items()},
        "seconds": round(counters.row()["time/total"], 1),
        "threads": torch.get_num_threads(),
    }
    with console.wait("drawing the curves"):
        draw_curves(RunFolder(records.folder))
    with console.wait("closing the records"):
        records.summary(summary)
    closing(console, run, records.folder, before, after, components.eval_problems, summary, components.mirror)
    return float(summary["accuracy"])


def due(run: TrainingConfig, done: Fraction, width: Fraction, n_steps: int) -> bool:
    """Whether the settings ask for an evaluation behind the update that ends at `done` steps."""
    return evaluation_due(done, width, n_steps, run.eval_every, run.longest_without_evaluation)


def sampled(collected: Collected, held: int) -> dict[str, float]:
    """What was sampled for a step, and how it was graded; `held`: how often the engine had been given weights."""
    samples = collected.samples
    if not samples:
        return {}
    versions = [s.response.weight_version for s in samples]
    metrics = rollout_metrics(samples) | grading_metrics([s.grade for s in samples])
    return metrics | {"rollout/staleness": held - sum(versions) / len(versions)}


def verdict(step: int, updates: Sequence[Mapping[str, float]], learner: Learner) -> tuple[str, str]:
    """(status, reason) after the updates of a step: has the run diverged?"""
    if any(not math.isfinite(u.get("train/loss", 0.0)) for u in updates):
        return "diverged:loss", f"the loss of step {step} is no number"
    tried = [u for u in updates if not u["train/empty_updates"]]
    if tried and all(u["train/skipped_updates"] for u in tried):
        return "diverged:gradient", f"no update of step {step} had a finite gradient"
    if updates and not learner.weights_are_finite():
        return "diverged:weights", f"weights are no numbers after step {step}"
    return "finished", ""


def summed_up(
    run: TrainingConfig, components: Components, status: str, reason: str, before: Evaluated, after: Evaluated
) -> dict[str, Any]:
    """What the run came to. `accuracy` is that of the last evaluation, over the whole split where that was asked."""
    whole = bool(after.final)
    final = after.final if whole else {k.replace("eval/", "final/"): v for k, v in after.metrics.items()}
    lost = status == "diverged:weights"  # what was measured before says nothing about such a model
    asks, tokenizer = components.examiner.settings, components.policy.tokenizer
    return {
        "status": status,
        "reason": reason,
        "accuracy_before": before.metrics["eval/accuracy"],
        "accuracy_after": math.nan if lost else after.metrics["eval/accuracy"],  # on the same problems
        "accuracy": math.nan if lost else final["final/accuracy"],
        "accuracy_interval": [final["final/accuracy_low"], final["final/accuracy_high"]],
        "length_before": before.metrics["eval/length"],
        "length": final["final/length"],
        "interim_eval_problems": len(components.eval_problems),
        "eval_problems": int(final["final/problems"]),
        **({"start": asdict(components.start)} if components.start else {}),
        "data": components.data_hash,
        "data_sizes": components.sizes,
        **more_accuracies({k.replace("final/", "eval/"): v for k, v in final.items()}, *components.examiner.rewards),
        "protocol": protocol_of(asks, components.final_problems if whole else components.eval_problems, tokenizer),
        "protocol_on_the_way": protocol_of(asks, components.eval_problems, tokenizer)["hash"],
    }
