"""Put the rooms of a run together from its config: data, prompt, policy, engine, grader, algorithm, learner.

The only room that reads configuration and builds parts; the parts themselves get plain values.
"""

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from rlreason.algorithms.grpo import GroupRelative, Reference
from rlreason.algorithms.rollouts import Rollouts
from rlreason.config.grpo import GRPO
from rlreason.config.model import TinyModel
from rlreason.config.run import Run
from rlreason.config.store import resource_dir
from rlreason.console import Console
from rlreason.data.files import fingerprint
from rlreason.engines.base import Engine, Sampling
from rlreason.errors import ConfigError
from rlreason.grading import Grader, check_golds
from rlreason.learner import Learner
from rlreason.mirror import WandbMirror
from rlreason.policy import Policy
from rlreason.prompts import load_template, render
from rlreason.records import Mirror
from rlreason.setup.data import load_data
from rlreason.setup.engine import make_engine
from rlreason.setup.learner import credit_rule, make_learner
from rlreason.setup.model import Render, choose_threads, make_policy, teach_habits
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class House:
    """A run's parts, ready to use."""

    policy: Policy
    engine: Engine
    grader: Grader
    rollouts: Rollouts
    algorithm: GroupRelative
    learner: Learner
    train_problems: list[Problem]
    eval_problems: list[Problem]
    eval_sampling: Sampling
    data_hash: str
    mirror: Mirror | None
    seconds_to_build: float

    def close(self) -> None:
        self.engine.close()
        self.grader.close()


def build(run: GRPO, folder: Path, console: Console) -> House:
    """Everything that can be wrong in what was asked is found before a model is trained: cheapest checks first."""
    began = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the grader's processes would warn about it
    torch.manual_seed(run.seed)
    choose_threads(run)
    prompt = renderer(run)
    mirror = make_mirror(run, folder)
    train, validation = load_data(run)
    check_amount(run, train)
    grader = make_grader(run, folder, [*train, *validation], console)  # its workers start before a GPU is touched
    try:
        policy = make_policy(run, train, prompt)
        check_lengths(run, policy, [*train, *validation], prompt)
        if isinstance(run.model, TinyModel):
            teach_habits(run, run.model, policy, train, prompt, console)
    except BaseException:
        grader.close()
        raise
    engine = make_engine(run, policy)
    rollouts = Rollouts(engine, grader, lambda question: policy.encode_prompt(prompt(question)), run.seed)
    sampling = Sampling(**asdict(run.sampling), stop=tuple(run.prompt.stop))
    return House(
        policy=policy,
        engine=engine,
        grader=grader,
        rollouts=rollouts,
        algorithm=make_algorithm(run, policy, rollouts, train, sampling),
        learner=make_learner(run, policy),
        train_problems=train,
        eval_problems=validation[: run.eval_problems],
        eval_sampling=sampling,
        data_hash=fingerprint([*train, *validation]),
        mirror=mirror,
        seconds_to_build=time.monotonic() - began,
    )


def renderer(run: Run) -> Render:
    """The run's template as a function from a question to its prompt."""
    return partial(render, load_template(run.prompt.file, resource_dir("prompts")))


def check_amount(run: GRPO, train: Sequence[Problem]) -> None:
    """A step asks different questions; with fewer than it needs, every batch would silently be smaller."""
    if len(train) < run.questions:
        raise ConfigError(
            f"rollout_batch_size={run.rollout_batch_size} with group_size={run.group_size} asks {run.questions} "
            f"different questions a step, and there are {len(train)}: lower rollout_batch_size, or give more data"
        )


def make_grader(run: Run, folder: Path, problems: Sequence[Problem], console: Console) -> Grader:
    """The grader with its workers running. A gold answer that does not grade itself right can never be earned: said."""
    grader = Grader(reward=run.prompt.reward, log_path=folder / "grading_incidents.jsonl", **asdict(run.grading))
    grader.start()
    if grader.plugin and grader.grade_batch(["probe"], [problems[0].answer])[0].outcome == "error":
        grader.close()
        raise ConfigError(
            f"prompt.reward={run.prompt.reward} cannot be imported, or fails on ('probe', a gold answer): give "
            "module:function, importable from here, returning a number or a dict with reward"
        )
    bad = check_golds(grader, [p.answer for p in problems])
    if bad:
        names = ", ".join(problems[i].id for i in bad[:5]) + (" ..." if len(bad) > 5 else "")
        console.say(f"! {len(bad)} gold answers do not grade themselves right and cannot be earned: {names}")
    grader.take_metrics()
    return grader


def make_mirror(run: Run, folder: Path) -> Mirror | None:
    if run.logger.kind == "none":
        return None
    return WandbMirror(folder, run.logger.project, run.logger.mode, asdict(run))


def check_lengths(run: Run, policy: Policy, problems: Sequence[Problem], prompt: Render) -> None:
    """The longest prompt and a full response must fit into the model's context and into one micro-batch."""
    needed = max(len(policy.encode_prompt(prompt(p.question))) for p in problems) + run.sampling.max_tokens
    for key, room in (("micro_batch_tokens", run.micro_batch_tokens), ("the model's context", policy.max_context)):
        if needed > room:
            raise ConfigError(
                f"sampling.max_tokens={run.sampling.max_tokens} and the longest prompt need {needed} tokens, more than "
                f"{key}={room}: lower sampling.max_tokens" + (f", or set {key}={needed}" if key[0] == "m" else "")
            )


def make_algorithm(
    run: GRPO, policy: Policy, rollouts: Rollouts, train: list[Problem], sampling: Sampling
) -> GroupRelative:
    return GroupRelative(
        rollouts=rollouts,
        problems=train,
        sampling=sampling,
        questions=run.questions,
        group_size=run.group_size,
        rule=credit_rule(run),
        kl_estimator=run.kl_estimator,
        reference=make_reference(run, policy),
    )


def make_reference(run: GRPO, policy: Policy) -> Reference | None:
    """A frozen copy of the policy as it is now, only where a KL term asks for it: it costs the model's memory again."""
    if run.kl_placement == "none":
        return None
    frozen = Policy(
        copy.deepcopy(policy.model).requires_grad_(False), policy.tokenizer, policy.compute_dtype, policy.device
    )
    return partial(frozen.score, temperature=run.sampling.temperature, token_budget=run.micro_batch_tokens)
