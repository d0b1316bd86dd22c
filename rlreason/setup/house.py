"""The rooms that every job of rlreason needs, put together from the settings: problems, policy, engine, grader."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlreason.algorithms.rollouts import Measure, Rollouts
from rlreason.config.conditions import has_own_reward
from rlreason.config.data import Stories
from rlreason.config.imitation import SFT
from rlreason.config.model import TinyModel
from rlreason.config.run import Run, Training
from rlreason.config.store import resource_dir
from rlreason.console import Console
from rlreason.data.files import fingerprint
from rlreason.data.splits import subset
from rlreason.engines.base import Engine, Sampling
from rlreason.errors import ConfigError
from rlreason.grading import Grader, verifiers
from rlreason.mirror import WandbMirror
from rlreason.policy import Policy
from rlreason.prompts import load_template, render
from rlreason.records import Mirror
from rlreason.setup.data import load_data, read_splits
from rlreason.setup.engine import check_engine, make_engine
from rlreason.setup.model import (
    choose_threads,
    choose_trained,
    describe_weights,
    make_policy,
    teach_habits,
)
from rlreason.types import Problem

PromptIds = Callable[[Problem], list[int]]
Render = Callable[[str], str]  # a question -> its prompt


@dataclass(frozen=True, slots=True)
class House:
    """A run's rooms, ready to use."""

    policy: Policy
    engine: Engine
    grader: Grader
    rollouts: Rollouts
    sampling: Sampling
    measure: Measure
    train_problems: list[Problem]
    eval_problems: list[Problem]  # of the evaluations on the way
    final_problems: list[Problem]  # of the last one, or of a job that does not train; the others are among them
    data_hash: str
    sizes: dict[str, int]  # problems read, filtered and left
    mirror: Mirror | None
    seconds_to_build: float

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self.grader.close()


def build(run: Run, folder: Path, console: Console) -> House:
    """Everything that can be wrong in what was asked is found before a model is trained: cheapest checks first."""
    began = time.monotonic()
    check_engine(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the grader's processes would warn about it
    torch.manual_seed(run.seed)
    prompt = renderer(run)
    mirror = make_mirror(run, folder)
    grader = make_grader(run, folder)  # its workers start before a GPU is touched
    try:
        train, validation, sizes = load_data(run, grader=grader, say=console.say)
        check_reward(run, grader, validation)
        lessons = read_splits(run.data, console.say)[0] if isinstance(run.data, Stories) else train
        policy = make_policy(run, lessons)
        choose_threads(run, policy)
        prompt_ids = encoder(policy, prompt)
        train, validation = fitting(run, policy, prompt_ids, train, validation, console)
        if isinstance(run.model, TinyModel):
            teach_habits(run, run.model, policy, lessons, console)
        if isinstance(run, Training):
            choose_trained(run.model, policy, run.seed)
        else:
            describe_weights(run.model, policy, learned=False)
        engine = make_engine(run, policy, folder, console.say)
    except BaseException as error:
        grader.close()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("before the first step") from None
        raise

    def asked(count: int | None) -> list[Problem]:
        """The first stories, which are in no order; of files, which may be sorted by subject, a draw that is fixed."""
        return validation[:count] if isinstance(run.data, Stories) else subset(validation, count, seed=0)

    temperature = run.sampling.temperature or 1.0  # greedy responses are measured under the plain distribution
    return House(
        policy=policy,
        engine=engine,
        grader=grader,
        rollouts=Rollouts(engine, grader, prompt_ids, run.seed),
        sampling=Sampling(**asdict(run.sampling), stop=tuple(run.prompt.stop)),
        measure=partial(policy.score_with_entropy, temperature=temperature, token_budget=run.micro_batch_tokens),
        train_problems=train,
        eval_problems=asked(run.problems_on_the_way),
        final_problems=asked(run.eval_problems),
        data_hash=fingerprint([*train, *validation]),
        sizes=sizes | {"train": len(train), "validation": len(validation)},
        mirror=mirror,
        seconds_to_build=time.monotonic() - began,
    )


def encoder(policy: Policy, prompt: Render) -> PromptIds:
    """A problem -> the token ids of its prompt: the one that came with it, or the run's template, filled."""
    return lambda problem: policy.encode_prompt(prompt(problem.question) if problem.prompt is None else problem.prompt)


def renderer(run: Run) -> Render:
    """The run's template as a function from a question to its prompt."""
    return partial(render, load_template(run.prompt.file, resource_dir("prompts")))


def make_grader(run: Run, folder: Path) -> Grader:
    """The grader with its workers running; data with a verifier of its own brings the reward along."""
    grader = Grader(reward=reward_name(run), log_path=folder / "grading_incidents.jsonl", **grading_settings(run))
    grader.start()
    return grader


def grading_settings(run: Run) -> dict[str, Any]:
    """The settings of the grader that act: a reward of one's own compares answers by rules of its own."""
    unread = ("extract", "percent", "rel_tol") if has_own_reward(run) else ("correct_at",)
    names = [f.name for f in fields(run.grading) if f.name not in unread]
    return {name: getattr(run.grading, name) for name in names}


def reward_name(run: Run) -> str:
    """The prompt's reward, or the data's own verifier of answers in that prompt's form."""
    reward = run.prompt.reward
    return reward if ":" in reward else verifiers.reward_name(reward, run.data.verifier)


def check_reward(run: Run, grader: Grader, problems: Sequence[Problem]) -> None:
    """A reward of the user's own is tried once, before anything is trained with it."""
    if grader.plugin and grader.grade_batch(["probe"], [problems[0].answer])[0].outcome == "error":
        raise ConfigError(
            f"the reward {grader.plugin} (prompt.reward, or data.verifier) cannot be imported, or fails on ('probe', a "
            "gold answer): give module:function, importable from here, returning a number or a dict with reward"
        )


def make_mirror(run: Run, folder: Path) -> Mirror | None:
    if run.logger.kind == "none":
        return None
    return WandbMirror(folder, run.logger, asdict(run))


def fitting(
    run: Run, policy: Policy, prompt_ids: PromptIds, train: list[Problem], validation: list[Problem], console: Console
) -> tuple[list[Problem], list[Problem]]:
    """The problems whose prompt and a full response fit into the model's context and into one micro-batch.

    What does not fit is refused, or left out and said (data.bad_rows). SFT samples no answers to its training
    questions; its traces are measured when they are made.
    """
    room, key = min((run.micro_batch_tokens, "micro_batch_tokens"), (policy.max_context, "the model's context"))
    longest, skip = room - run.sampling.max_tokens, run.data.bad_rows == "skip"
    parts = {"train": [] if isinstance(run, SFT) else train, "validation": validation}
    for name, problems in parts.items():
        sizes = [len(prompt_ids(p)) for p in problems]
        if not sizes or max(sizes) <= longest:
            continue
        needed, count = max(sizes) + run.sampling.max_tokens, sum(size > longest for size in sizes)
        if not skip or min(sizes) > longest:
            raise ConfigError(
                f"sampling.max_tokens={run.sampling.max_tokens} and the longest prompt need {needed} tokens, more than "
                f"{key}={room} ({count} of {len(sizes)} {name} prompts): lower sampling.max_tokens"
                + (f", or set {key}={needed}" if key[0] == "m" else "")
                + ("" if count == len(sizes) else ", or leave them out with data.bad_rows=skip")
            )
        console.say(f"! left out: {count} of {len(sizes)} {name} problems, whose prompts are too long for {key}={room}")
        parts[name] = [p for p, size in zip(problems, sizes, strict=True) if size <= longest]
    return (train if isinstance(run, SFT) else parts["train"]), parts["validation"]
