"""Train a run: build its parts, run the loop, close the records."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from rlreason.config.algorithms import GRPOConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.evaluation.accuracy import is_correct
from rlreason.evaluation.evaluator import Validation, protocol_of
from rlreason.evaluation.protocol import write_card
from rlreason.health.watch import Monitors
from rlreason.model.policy import Policy
from rlreason.objectives.card import TEXT_WIDTH
from rlreason.records.console import Console, closing_table
from rlreason.records.files import COMPLIANCE, CURVES, OBJECTIVE, checkpoints_in, moments_in, remove_moments
from rlreason.records.reader import RunFolder, time_line
from rlreason.records.rows import Counters
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.runtime.clock import Clock, ModelSize, peak_tflops
from rlreason.runtime.machine import SWEEP_VARIABLE, place_of, world_of
from rlreason.runtime.text import shorten
from rlreason.training.algorithms import Batches
from rlreason.training.build import (
    Components,
    build_components,
    make_algorithm,
    make_learner,
    start_records,
)
from rlreason.training.learner import Learner
from rlreason.training.progress import LOST, SHOWN_CHARS, common_summary, print_accuracies, sets_summary
from rlreason.training.trainer import Trainer

SWEEP_NEXT = "  python -m rlreason -m sweep=grpo_learning_rate   # five learning rates: which is better, by how much"


def train(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Train `run`, record everything in the folder of `records`, and return the final validation accuracy."""
    assert isinstance(run, TrainingConfig)
    components = build_components(run, records.folder, console, records.clock)
    with trainer_of(run, components, records, console) as trainer:
        try:
            return close_records(trainer, *trainer.train())
        except KeyboardInterrupt as stop:
            signals.arrived()
            records.loggers.finish({"status": "interrupted"})
            if trainer.validation.history:
                draw_curves(RunFolder(records.folder))
            done = trainer.steps_done
            where = f"after step {done} of {trainer.batches.n_steps}" if done else "before the first step"
            console.say(f"it goes on with: python -m rlreason resume={records.folder}")
            raise type(stop)(f"{stop} {where}".strip()) from None


@contextmanager
def trainer_of(run: TrainingConfig, components: Components, records: RunWriter, console: Console) -> Iterator[Trainer]:
    """Yield the trainer of a run that has these components; at the end of the block, close them and all it started."""
    counters, policy = Counters(clock=records.clock), components.policy
    with ExitStack() as closing:  # the last one first
        closing.callback(lambda: records.loggers.finish(None))  # still open only if the run failed
        closing.callback(components.close)
        algorithm = make_algorithm(run, components, console)
        learner: Learner
        world = world_of(run.gpus, place_of(), torch.cuda.device_count())
        if world == 1:
            learner = make_learner(run, policy)
        else:
            from rlreason.training.distributed import make_ranked_learner  # torch's parts for it take a second to load

            reference = getattr(algorithm, "reference", None)  # the ranks score it, too
            learner = make_ranked_learner(run, policy, reference, world, records.folder)
            closing.callback(learner.ranks.close)
        batches = Batches(algorithm, run.rollout.async_level > 0, records.clock)
        closing.callback(batches.close)
        closing.callback(components.close)  # before the batches: it ends the sampling ahead
        start_records(run, components, records, console)
        train, validate, last = components.train_problems, components.eval_problems, components.final_problems
        sizes = f"{len(train)} to train on, {len(validate)} to validate on the way, {len(last)} at the end"
        console.say(f"data       {run.data.name}: {sizes}; prompt={run.prompt.name}")
        console.say(f"batch      {run.describe_batch(algorithm.n_steps)}, learning rate {run.peak_learning_rate:g}")
        card = run.card()
        records.document(OBJECTIVE, card.markdown)
        console.table("\n" + card.fitted(min(console.width, TEXT_WIDTH)))
        measure_flops(records.clock, policy, world)
        group_size, limit = getattr(run, "group_size", 1), run.sampling_key("max_tokens")
        monitors = Monitors(group_size, console.say, run.monitors, limit)
        for name, warning in run.warnings().items():
            monitors.warn(0, name, warning)
        validation = Validation(
            components.evaluator, validate, last, records, monitors, counters, console, components.sets
        )
        yield Trainer(run, components, batches, learner, validation)


def measure_flops(clock: Clock, policy: Policy, ranks: int) -> None:
    """Make the clock count this model's FLOPs and, on a GPU, its memory; `ranks` processes train it."""
    config, device, peak = policy.model.config.get_text_config(), policy.device, None
    if device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))

        def gauge() -> float:
            peak_bytes = float(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            return peak_bytes

        clock.gauge = gauge
    heads, parameters = config.num_attention_heads, sum(p.numel() for p in policy.model.parameters())
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    if not config.tie_word_embeddings:
        parameters -= policy.model.get_input_embeddings().weight.numel()  # which are looked up
    clock.model = ModelSize(parameters, config.num_hidden_layers, width, peak, ranks)


def close_records(trainer: Trainer, status: str, reason: str) -> float:
    """Draw the curves, write the summary and print the closing table of a run that has ended; return the accuracy.

    The summary's `accuracy` is that of the last evaluation, over the whole split if it was evaluated; NaN if the
    weights are lost.
    """
    run, console, records, components = trainer.run, trainer.console, trainer.records, trainer.components
    folder, left = records.folder, RunFolder(records.folder)
    first, last = trainer.validation.history[0], trainer.validation.history[-1]
    if status != "finished":
        console.say(f"! {status}: {reason}; resume={folder} with a larger budget, or this monitor at warn")
    else:
        tried = [row for row in left.metrics if row.get("train/empty_updates") == 0]
        if tried and all(row.get("train/overflows") for row in tried):
            reason = f"no update was taken: all {len(tried)} overflowed in float16: set model.dtype=float32"
            status = "diverged:gradient"
            console.say(f"! {reason}")
    with trainer.waiting("drawing the curves", "record"):
        draw_curves(left)
    if status in ("finished", "budget"):  # else the newest may be the broken one
        trainer.prune(keep=1)  # one is enough to train for more steps
    done = checkpoints_in(folder) if status == "finished" and not run.checkpoint.keep_final else []
    settings, tokenizer = components.evaluator.settings, components.policy.tokenizer
    problems = components.final_problems if last.last else components.eval_problems
    protocol = protocol_of(settings, problems, tokenizer)
    sets = sets_summary(components, last.sets, last.last)
    summary = common_summary(components, last.whole, protocol, trainer.monitors, trainer.clock) | {
        **sets,
        "status": status,
        "reason": reason,
        "accuracy_before": first.metrics["eval/accuracy"],
        "accuracy_after": last.metrics["eval/accuracy"],  # on the same problems
        "length_before": first.metrics["eval/length"],
        "interim_eval_problems": len(components.eval_problems),
        "eval_problems": int(last.whole["eval/problems"]),
        "data": components.data_hash,
        "protocol_on_the_way": protocol_of(settings, components.eval_problems, tokenizer)["hash"],
        "alarm": trainer.monitors.stopped.get("alarm", {}),
        **{name: round(value, 1) for name, value in trainer.counters.row().items()},
        "checkpoints": trainer.cost | {"moments_removed": sum(map(moments_in, done))},
    }
    if status == LOST:
        summary |= {"accuracy_after": math.nan, "accuracy": math.nan}
    with console.wait("closing the records"):
        if run.eval.card:
            write_card(folder, summary)
        records.summary(summary)
        for path in done:  # after the summary: the finished run cannot be resumed exactly without them
            remove_moments(path)
    asked = list(zip(components.eval_problems, first.samples, last.samples, strict=True))
    solved = [one for one in asked if is_correct(one[2]) and not is_correct(one[1])]
    problem, *examples = (solved or asked)[0]  # solved only now, if there is one
    console.say(f"\n  {problem.question}   (answer: {problem.answer})")
    for label, sample in zip(("before", "after"), examples, strict=True):
        console.say(f"  {label:6} {shorten(sample.text, SHOWN_CHARS)}   [{sample.grade.outcome}]")
    console.table("\n" + closing_table(first.metrics, last.metrics))
    print_accuracies(console, summary, records.loggers)
    console.say(time_line(summary))
    if notices := summary["notices"]:
        console.say("notices    " + ", ".join(f"{name} x{count}" for name, count in notices.items()))
    if run.eval.card:
        console.say((folder / COMPLIANCE).read_text(encoding="utf-8").splitlines()[-1])
    console.say(f"{status} in {summary['seconds']:.0f} s; curves: {folder / CURVES}")
    if SWEEP_VARIABLE not in os.environ:
        console.say(f"\nTry next:\n  rlreason inspect {folder}\n  rlreason report {folder}")
        if isinstance(run, GRPOConfig) and run.model.made_on_the_spot:
            console.say(SWEEP_NEXT)
    return float(summary["accuracy"])
