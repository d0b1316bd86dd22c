"""The words around a run: what is about to happen, and what came of it. It knows records and numbers, not tensors."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlreason.config.grpo import GRPO
from rlreason.config.model import TinyModel
from rlreason.console import Console, closing_table
from rlreason.sweeps import JOB_OF_SWEEP
from rlreason.types import Problem, Sample


def header(console: Console, run: GRPO, model: str, problems: tuple[int, int], folder: Path, seconds: float) -> None:
    updates = run.updates_per_rollout
    steps = f"{updates} optimizer step{'s' if updates > 1 else ''} of {run.train_batch_size}"
    console.say(f"model      {run.model.name}: {model}; ready after {seconds:.0f} s")
    console.say(
        f"data       {run.data.name}: {problems[0]} to train on, {problems[1]} to validate; prompt={run.prompt.name}"
    )
    rate = f"learning rate {run.learning_rate:g}"
    console.say(f"batch      {run.questions} questions x {run.group_size} responses, {steps}, {rate}")
    console.say(f"records    {shown(folder)}")


def shown(folder: Path) -> str:
    """A path as short as it can be typed from here."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def before_and_after(problem: Problem, before: Sample, after: Sample) -> list[str]:
    lines = [f"\nThe same question, before and after:\n  {problem.question}   (answer: {problem.answer})"]
    for label, sample in (("before", before), ("after", after)):
        text = " ".join(sample.response.text.split())
        text = text if len(text) <= 300 else text[:300] + " ..."
        lines.append(f"  {label:6} {text}   [{sample.grade.outcome}]")
    return lines


def telling_pair(before: list[Sample], after: list[Sample]) -> tuple[Sample, Sample]:
    """A problem that went from wrong to right where there is one, otherwise the first."""
    pairs = list(zip(before, after, strict=True))
    won = [(b, a) for b, a in pairs if not b.grade.reward and a.grade.reward]
    return (won or pairs)[0]


def closing(
    console: Console,
    run: GRPO,
    folder: Path,
    before: tuple[list[Sample], Mapping[str, Any]],
    after: tuple[list[Sample], Mapping[str, Any]],
    problems: Sequence[Problem],
    summary: Mapping[str, Any],
) -> None:
    first, last = telling_pair(before[0], after[0])
    problem = next(p for p in problems if p.id == first.group)
    for line in before_and_after(problem, first, last):
        console.say(line)
    console.say("\n" + closing_table(before[1], after[1]))
    if summary["notices"]:
        seen = ", ".join(f"{name} x{count}" for name, count in summary["notices"].items())
        console.say(f"notices    {seen}")
    console.say(
        f"\n{summary['status']} in {summary['seconds']:.0f} s (threads: {summary['threads']}); "
        f"curves: {shown(folder / 'curves.png')}" + (f", model: {shown(folder / 'model')}" if run.save_model else "")
    )
    if isinstance(run.model, TinyModel) and JOB_OF_SWEEP not in os.environ:
        console.say(
            "\nTry next:\n"
            "  python -m rlreason loss=grpo_clip off_policy=e4_quarter   # 16 optimizer steps per rollout batch\n"
            "  python -m rlreason loss=no_baseline                       # does the baseline matter here?\n"
            "  python -m rlreason -m sweep=grpo_learning_rate            # five learning rates, one of them diverges\n"
            "  python -m rlreason model=local model.path=DIR data.path=GSM8K_DIR   # a real model on GSM8K"
        )
