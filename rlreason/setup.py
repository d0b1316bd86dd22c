"""Put the rooms of a run together from its config: data, prompt, policy, engine, grader, algorithm, learner.

The only room that reads configuration and builds parts; the parts themselves get plain values.
"""

import copy
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from rlreason.algorithms.grpo import GroupRelative, Reference
from rlreason.algorithms.rollouts import Rollouts
from rlreason.config.groups import FileData, PretrainedModel, Stories, TinyModel
from rlreason.config.run import GRPO, Run
from rlreason.config.store import resource_dir
from rlreason.console import Console
from rlreason.data.files import fingerprint, load_folder_or_hub, subset
from rlreason.data.stories import habit_trace, make_stories
from rlreason.engines.base import Engine, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.errors import ConfigError
from rlreason.grading import Grader, check_golds
from rlreason.learner import Learner, TokenObjective
from rlreason.mirror import WandbMirror
from rlreason.models.tiny import build_model, build_tokenizer
from rlreason.models.warm_start import warm_up
from rlreason.objectives.credit import CreditRule
from rlreason.policy import Policy, load_policy, pick_device, pick_dtype
from rlreason.prompts import load_template, render
from rlreason.records import Mirror
from rlreason.types import Problem

Render = Callable[[str], str]  # a question -> its prompt


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
    engine = HFEngine(policy, run.rollout.max_rows)
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


def choose_threads(run: Run) -> None:
    """As asked; one for the tiny model, and torch's own choice otherwise.

    Products this small gain a quarter from a second thread, and lose tenfold when another program wants its core.
    """
    if run.threads or isinstance(run.model, TinyModel):
        torch.set_num_threads(run.threads or 1)


def renderer(run: Run) -> Render:
    """The run's template as a function from a question to its prompt."""
    return partial(render, load_template(run.prompt.file, resource_dir("prompts")))


def load_data(run: Run) -> tuple[list[Problem], list[Problem]]:
    data = run.data
    if isinstance(data, Stories):
        make = partial(make_stories, min_events=data.min_events, max_events=data.max_events, max_value=data.max_value)
        return make(data.n_train, seed=0), make(data.n_validation, seed=0, validation=True)
    assert isinstance(data, FileData)
    train, validation = load_folder_or_hub(data.path, data.name)
    if not train or not validation:
        raise ConfigError(
            f"data.path={data.path} has {len(train)} training and {len(validation)} test rows: both need some"
        )
    return subset(train, data.train_limit, run.seed), validation


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


def make_policy(run: Run, train: Sequence[Problem], prompt: Render) -> Policy:
    """The model as it is before any training: loaded, or made on the spot with random weights."""
    if isinstance(run.model, PretrainedModel):
        return load_policy(str(Path(run.model.path).expanduser()), run.model.dtype)
    assert isinstance(run.model, TinyModel)
    tiny, device = run.model, pick_device()
    rng = random.Random("tokenizer")  # the same tokenizer for every seed
    tokenizer = build_tokenizer(prompt(p.question) + habit_trace(p, rng, 0.5, 0.0) for p in train[:2000])
    model = build_model(len(tokenizer), tiny.width, tiny.layers, tiny.heads, seed=run.seed)
    return Policy(model, tokenizer, pick_dtype(tiny.dtype, device), device)


def teach_habits(
    run: Run, tiny: TinyModel, policy: Policy, train: Sequence[Problem], prompt: Render, console: Console
) -> None:
    console.say("teaching a new tiny model two habits: mostly hasty answers, sometimes step by step ...")
    settings, tokens = asdict(tiny.warm_start), run.micro_batch_tokens
    warm_up(policy, train, prompt, **settings, micro_batch_tokens=tokens, seed=run.seed, progress=console.progress)


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


def credit_rule(run: GRPO) -> CreditRule:
    longest = run.sampling.max_tokens
    return CreditRule(
        baseline=run.baseline.kind,
        std_norm=run.std_norm.kind,
        advantage_eps=run.advantage_eps,
        zero_variance=run.zero_variance,
        overlong=run.overlong,
        max_length=longest,
        cache_length=run.overlong_cache or max(1, longest // 5),
        kl_coef=run.kl_coef if run.kl_placement == "reward" else 0.0,
    )


def make_reference(run: GRPO, policy: Policy) -> Reference | None:
    """A frozen copy of the policy as it is now, only where a KL term asks for it: it costs the model's memory again."""
    if run.kl_placement == "none":
        return None
    frozen = Policy(
        copy.deepcopy(policy.model).requires_grad_(False), policy.tokenizer, policy.compute_dtype, policy.device
    )
    return partial(frozen.score, temperature=run.sampling.temperature, token_budget=run.micro_batch_tokens)


def make_learner(run: GRPO, policy: Policy) -> Learner:
    objective = TokenObjective(
        loss_type=run.loss.loss_type,
        numbers=run.loss.numbers(),
        length_norm=run.length_norm.kind,
        constant=run.length_norm.constant or float(run.sampling.max_tokens),
        kl_estimator=run.kl_estimator,
        kl_coef=run.kl_coef if run.kl_placement == "loss" else 0.0,
        entropy_coef=run.entropy_coef,
        mismatch=run.mismatch,
        mismatch_cap=run.mismatch_cap,
    )
    return Learner(
        policy,
        objective,
        run.learning_rate,
        temperature=run.sampling.temperature,
        weight_decay=run.weight_decay,
        betas=(run.adam_betas[0], run.adam_betas[1]),
        max_grad_norm=run.max_grad_norm,
        micro_batch_tokens=run.micro_batch_tokens,
        micro_batch_size=run.sequences_per_micro_batch(),
    )
