"""The rooms that every job of rlreason needs, put together from the settings: problems, policy, engine, grader."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from rlreason.algorithms.rollouts import Rollouts
from rlreason.config.data import StoriesConfig
from rlreason.config.evaluation import EvalProtocolConfig, evaluation_of
from rlreason.config.jobs import EvalJobConfig
from rlreason.config.model import TinyModelConfig
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.data.files import fingerprint
from rlreason.data.splits import subset
from rlreason.engines.base import Engine, Sampling
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import Evaluator
from rlreason.grading import Grader
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer
from rlreason.records.console import Console
from rlreason.records.wandb_logger import WandbLogger
from rlreason.records.writer import MetricSink
from rlreason.setup.data import load_data, read_splits
from rlreason.setup.engine import check_engine, demand_of, make_engine
from rlreason.setup.fits import longest_prompt, parts, too_long
from rlreason.setup.graders import make_graders
from rlreason.setup.model import (
    check_attention,
    choose_threads,
    choose_trained,
    describe_weights,
    make_policy,
    teach_habits,
)
from rlreason.setup.probe import own_functions, refusal
from rlreason.setup.prompts import PromptIds, check_prompt, encoder, end_of_turn, remarks
from rlreason.setup.start import Start
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class Components:
    """A run's rooms, ready to use."""

    policy: Policy
    engine: Engine
    grader: Grader
    rollouts: Rollouts
    sampling: Sampling
    scorer: LogProbScorer  # at training's temperature
    evaluator: Evaluator
    train_problems: list[Problem]
    eval_problems: list[Problem]  # of the evaluations on the way
    final_problems: list[Problem]  # of the last one, or of a job that does not train; the others are among them
    start: Start | None  # where the built-in model's weights came from
    data_hash: str
    sizes: dict[str, int]  # problems read, filtered and left
    mirror: MetricSink | None
    seconds_to_build: float

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            for grader in (self.grader, self.evaluator.grader, self.evaluator.second_grader):
                if grader is not None:
                    grader.close()


def build_components(run: RunConfig, folder: Path, console: Console) -> Components:
    """Everything that can be wrong in what was asked is found before a model is trained: cheapest checks first."""
    began = time.monotonic()
    check_engine(run)
    check_attention(run.model)
    choose_threads(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the grader's processes would warn about it
    torch.manual_seed(run.seed)
    evaluation = evaluation_of(run)
    learns = not isinstance(run, EvalJobConfig)
    prompt = run.prompt if learns else evaluation.prompt
    check_prompt(prompt, run.model)
    if evaluation.prompt is not prompt:
        check_prompt(evaluation.prompt, run.model, "eval.prompt")
    with console.wait("starting the logger"):
        mirror = make_mirror(run, folder)
    graders = make_graders(run, folder)  # their workers start before a GPU is touched
    try:
        with console.wait("reading the data"):
            judges = {"grader": graders.training, "judge": graders.evaluation}
            train, validation, sizes = load_data(run, **judges, say=console.say)
            for grader in graders.all():  # each on an answer of the kind that it is to judge
                learned = grader is graders.training and grader is not graders.evaluation
                check_reward(run, grader, train if learned and train else validation)
            for remark in [*remarks(prompt, train), *remarks(evaluation.prompt, validation)]:
                console.say(remark)
            lessons = read_splits(run.data, console.say)[0] if isinstance(run.data, StoriesConfig) else train
        with console.wait("loading the model"):
            policy = make_policy(run, lessons)
        choose_threads(run, policy)
        prompt_ids, asked_ids = encoder(policy, prompt), encoder(policy, evaluation.prompt)
        with console.wait("measuring the prompts"):
            for part in parts(run, train, validation):
                ids = asked_ids if part.prompt is evaluation.prompt else prompt_ids
                kept = fitting(run, policy, ids, part.name, part.problems, part.max_tokens, console)
                train, validation = (kept, validation) if part.name == "train" else (train, kept)
        tiny = run.model if isinstance(run.model, TinyModelConfig) else None
        start = teach_habits(run, tiny, policy, lessons, console) if tiny else None
        if isinstance(run, TrainingConfig):
            choose_trained(run.model, policy, run.seed)
        else:
            describe_weights(run.model, policy, learned=False)
        demand = partial(demand_of, run, prompt_ids, asked_ids, train, validation)
        with console.wait("starting the engine", logged=True):
            engine = make_engine(run, policy, folder, console.say, demand)
    except BaseException as error:
        graders.close()
        if mirror is not None:
            mirror.abandon()
        if isinstance(error, KeyboardInterrupt):
            raise type(error)(f"{error} before the first step".strip()) from None
        raise

    def asked(count: int | None) -> list[Problem]:
        """The first stories, which are in no order; of files, which may be sorted by subject, a draw that is fixed."""
        return validation[:count] if isinstance(evaluation.data, StoriesConfig) else subset(validation, count, seed=0)

    def scorer(temperature: float) -> LogProbScorer:
        """Greedy responses are scored under the plain distribution."""
        return LogProbScorer(policy, temperature or 1.0, run.micro_batch_tokens)

    evaluator = Evaluator(
        settings=evaluation,
        rollouts=Rollouts(engine, graders.evaluation, asked_ids, run.seed, console.part, graders.beside),
        sampling=sampled(evaluation, policy),
        scorer=scorer(evaluation.sampling.temperature),
        grader=graders.evaluation,
        second_grader=graders.beside,
    )
    return Components(
        policy=policy,
        engine=engine,
        grader=graders.training,
        rollouts=Rollouts(engine, graders.training, prompt_ids, run.seed, console.part),
        sampling=sampled(run, policy) if learns else evaluator.sampling,
        scorer=scorer(run.sampling.temperature) if learns else evaluator.scorer,
        evaluator=evaluator,
        train_problems=train,
        eval_problems=asked(evaluation.problems),
        final_problems=asked(evaluation.final_problems),
        start=start,
        data_hash=fingerprint([*train, *validation]),
        sizes=sizes | {"train": len(train), "validation": len(validation)},
        mirror=mirror,
        seconds_to_build=time.monotonic() - began,
    )


def sampled(settings: RunConfig | EvalProtocolConfig, policy: Policy) -> Sampling:
    """How an engine samples, in training or in evaluations: a prompt's responses end as that prompt says."""
    end = end_of_turn(settings.prompt, policy.tokenizer)
    ends = frozenset() if end is None else frozenset({end})
    return Sampling(**asdict(settings.sampling), stop=tuple(settings.prompt.stop), end_ids=ends)


def check_reward(run: RunConfig, grader: Grader, problems: Sequence[Problem]) -> None:
    """A reward of the user's own is tried once, before anything is trained with it."""
    if not grader.plugin:
        return
    setting = next((key for key, name in own_functions(run) if name == grader.plugin), grader.plugin)
    if why := refusal(setting, grader, problems[0].answer, run.grading.timeout_s):
        raise ConfigError(why)


def make_mirror(run: RunConfig, folder: Path) -> MetricSink | None:
    if run.logger.kind == "none":
        return None
    return WandbLogger(folder, run.logger, asdict(run))


def fitting(
    run: RunConfig,
    policy: Policy,
    prompt_ids: PromptIds,
    name: str,
    problems: list[Problem],
    max_tokens: int,
    console: Console,
) -> list[Problem]:
    """The problems whose prompt and a full response fit into the model's context and into one micro-batch.

    What does not fit is refused, or left out and said (data.bad_rows). `name`: train or validation.
    """
    sizes, context = [len(prompt_ids(p)) for p in problems], policy.max_context
    if why := too_long(run, name, sizes, max_tokens, context):
        raise ConfigError(why)
    longest = longest_prompt(run, max_tokens, context)
    kept = [p for p, size in zip(problems, sizes, strict=True) if size <= longest]
    if len(kept) < len(problems):
        key = "the model's context" if context < run.micro_batch_tokens else "micro_batch_tokens"
        left = f"{len(problems) - len(kept)} of {len(problems)} {name} problems"
        room = min(context, run.micro_batch_tokens)
        console.say(f"! left out: {left}, whose prompts are too long for {key}={room}")
    return kept
