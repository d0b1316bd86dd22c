"""The rooms that every job of rlreason needs, put together from the settings: problems, policy, engine, grader."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from rlreason.algorithms.rollouts import Measure, Rollouts
from rlreason.config.data import Stories
from rlreason.config.evaluation import Evaluation, evaluation_of, sampling_key
from rlreason.config.imitation import SFT
from rlreason.config.jobs import Asking
from rlreason.config.model import TinyModel
from rlreason.config.run import Run, Training
from rlreason.console import Console
from rlreason.data.files import fingerprint
from rlreason.data.splits import subset
from rlreason.engines.base import Engine, Sampling
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.mirror import WandbMirror
from rlreason.policy import Policy
from rlreason.records import Mirror
from rlreason.setup.data import load_data, read_splits
from rlreason.setup.engine import check_engine, demand_of, make_engine
from rlreason.setup.graders import make_graders
from rlreason.setup.model import (
    check_attention,
    choose_threads,
    choose_trained,
    describe_weights,
    make_policy,
    teach_habits,
)
from rlreason.setup.preflight import own_functions
from rlreason.setup.prompts import PromptIds, check_prompt, encoder, end_of_turn, remarks
from rlreason.setup.start import Start
from rlreason.types import Problem, Sample


@dataclass(frozen=True, slots=True)
class Examiner:
    """What an evaluation asks and judges with, which training may do otherwise."""

    settings: Evaluation
    rollouts: Rollouts
    sampling: Sampling
    measure: Measure  # under the evaluation's temperature
    grader: Grader  # decides what is correct
    beside: Grader | None  # of the prompt's own reward, where another decides

    @property
    def rewards(self) -> tuple[str, str | None]:
        """By name: the one that counts, and the one beside it."""
        return self.grader.reward, None if self.beside is None else self.beside.reward

    def warnings(self, samples: Sequence[Sample]) -> list[str]:
        """What went wrong in grading these, by either grader, in one sentence each."""
        said = self.grader.warnings([s.grade for s in samples])
        if self.beside is not None:
            said += self.beside.warnings([s.prompt_grade for s in samples if s.prompt_grade is not None])
        return list(dict.fromkeys(said))


@dataclass(frozen=True, slots=True)
class House:
    """A run's rooms, ready to use."""

    policy: Policy
    engine: Engine
    grader: Grader
    rollouts: Rollouts
    sampling: Sampling
    measure: Measure
    examiner: Examiner
    train_problems: list[Problem]
    eval_problems: list[Problem]  # of the evaluations on the way
    final_problems: list[Problem]  # of the last one, or of a job that does not train; the others are among them
    start: Start | None  # where the built-in model's weights came from
    data_hash: str
    sizes: dict[str, int]  # problems read, filtered and left
    mirror: Mirror | None
    seconds_to_build: float

    def drawn(self) -> str:
        """What the engine has sampled so far, for a line of progress."""
        return f", {self.engine.drawn} tokens"

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            for grader in (self.grader, self.examiner.grader, self.examiner.beside):
                if grader is not None:
                    grader.close()

    def prompts(self, samples: Sequence[Sample]) -> list[str]:
        """The text that each of these is a response to, as the model read it."""
        decode = self.policy.tokenizer.decode
        texts = {s.group: str(decode(s.response.prompt_ids, clean_up_tokenization_spaces=False)) for s in samples}
        return [texts[s.group] for s in samples]


def build(run: Run, folder: Path, console: Console) -> House:
    """Everything that can be wrong in what was asked is found before a model is trained: cheapest checks first."""
    began = time.monotonic()
    check_engine(run)
    check_attention(run.model)
    choose_threads(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the grader's processes would warn about it
    torch.manual_seed(run.seed)
    evaluation = evaluation_of(run)
    learns = not isinstance(run, Asking)
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
            lessons = read_splits(run.data, console.say)[0] if isinstance(run.data, Stories) else train
        with console.wait("loading the model"):
            policy = make_policy(run, lessons)
        choose_threads(run, policy)
        prompt_ids, asked_ids = encoder(policy, prompt), encoder(policy, evaluation.prompt)
        with console.wait("measuring the prompts"):
            if not isinstance(run, SFT):  # which samples no answers to them; its traces are measured when made
                most = (run if learns else evaluation).sampling.max_tokens
                train = fitting(run, policy, prompt_ids, "train", train, most, console)
            most = evaluation.sampling.max_tokens
            validation = fitting(run, policy, asked_ids, "validation", validation, most, console)
        tiny = run.model if isinstance(run.model, TinyModel) else None
        start = teach_habits(run, tiny, policy, lessons, console) if tiny else None
        if isinstance(run, Training):
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
        return validation[:count] if isinstance(evaluation.data, Stories) else subset(validation, count, seed=0)

    def measured(temperature: float) -> Measure:
        """Greedy responses are measured under the plain distribution."""
        return partial(policy.score_with_entropy, temperature=temperature or 1.0, token_budget=run.micro_batch_tokens)

    examiner = Examiner(
        settings=evaluation,
        rollouts=Rollouts(engine, graders.evaluation, asked_ids, run.seed, console.part, graders.beside),
        sampling=sampled(evaluation, policy),
        measure=measured(evaluation.sampling.temperature),
        grader=graders.evaluation,
        beside=graders.beside,
    )
    return House(
        policy=policy,
        engine=engine,
        grader=graders.training,
        rollouts=Rollouts(engine, graders.training, prompt_ids, run.seed, console.part),
        sampling=sampled(run, policy) if learns else examiner.sampling,
        measure=measured(run.sampling.temperature) if learns else examiner.measure,
        examiner=examiner,
        train_problems=train,
        eval_problems=asked(evaluation.problems),
        final_problems=asked(evaluation.final_problems),
        start=start,
        data_hash=fingerprint([*train, *validation]),
        sizes=sizes | {"train": len(train), "validation": len(validation)},
        mirror=mirror,
        seconds_to_build=time.monotonic() - began,
    )


def sampled(settings: Run | Evaluation, policy: Policy) -> Sampling:
    """How an engine samples, in training or in evaluations: a prompt's responses end as that prompt says."""
    end = end_of_turn(settings.prompt, policy.tokenizer)
    ends = frozenset() if end is None else frozenset({end})
    return Sampling(**asdict(settings.sampling), stop=tuple(settings.prompt.stop), end_ids=ends)


def check_reward(run: Run, grader: Grader, problems: Sequence[Problem]) -> None:
    """A reward of the user's own is tried once, before anything is trained with it."""
    if not grader.plugin:
        return
    gold = problems[0].answer
    (grade,) = grader.grade_batch(["probe"], [gold])
    if grade.outcome == "error":
        setting = next((key for key, name in own_functions(run) if name == grader.plugin), grader.plugin)
        raise ConfigError(
            f"{setting} fails on the response 'probe' and the reference answer {gold[:40]!r}: "
            f"{grader.why_not(grade)}: mend it"
        )


def make_mirror(run: Run, folder: Path) -> Mirror | None:
    if run.logger.kind == "none":
        return None
    return WandbMirror(folder, run.logger, asdict(run))


def fitting(
    run: Run,
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
    asked, data = name == "validation", run.data if run.eval.data is None else run.eval.data
    own = sampling_key(run, "max_tokens") if asked or isinstance(run, Asking) else "sampling.max_tokens"
    skip = (data if asked else run.data).bad_rows == "skip"
    room, key = min((run.micro_batch_tokens, "micro_batch_tokens"), (policy.max_context, "the model's context"))
    longest, sizes = room - max_tokens, [len(prompt_ids(p)) for p in problems]
    if not sizes or max(sizes) <= longest:
        return problems
    needed, count = max(sizes) + max_tokens, sum(size > longest for size in sizes)
    if not skip or min(sizes) > longest:
        raise ConfigError(
            f"{own}={max_tokens} and the longest prompt need {needed} tokens, more than "
            f"{key}={room} ({count} of {len(sizes)} {name} prompts): lower {own}"
            + (f", or set {key}={needed}" if key[0] == "m" else "")
            + (
                ""
                if count == len(sizes)
                else f", or leave them out with {'eval.' * (asked and data is not run.data)}data.bad_rows=skip"
            )
        )
    console.say(f"! left out: {count} of {len(sizes)} {name} problems, whose prompts are too long for {key}={room}")
    return [p for p, size in zip(problems, sizes, strict=True) if size <= longest]
