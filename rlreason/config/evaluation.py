"""The config group `eval`: how a model is asked and judged, apart from how it is trained. null: as in training.

`evaluation_of` says what that comes to: one record, which everything that evaluates reads. It knows the other groups,
and no torch.
"""

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from rlreason.config.data import Data, FileData, Stories
from rlreason.config.groups import Grading, Prompt, Sampling
from rlreason.config.model import TinyModel
from rlreason.data.files import locate

NAMED_REWARDS = ("r1_zero", "question_only")


@dataclass
class EvalSampling:
    """What of `sampling` is otherwise in an evaluation."""

    temperature: float | None = None  # 0 takes the most likely token
    min_tokens: int | None = None
    max_tokens: int | None = None


@dataclass
class Eval:
    """Typed as `eval=leaderboard`, `eval.prompt=r1_zero`, `eval.data=gsm8k`, `eval.sampling.temperature=0` ..."""

    prompt: Prompt | None = None  # an option of `prompt`
    reward: str | None = None  # what counts: module:function, r1_zero or question_only; the prompt's is shown beside it
    sampling: EvalSampling = field(default_factory=EvalSampling)
    data: Data | None = None  # an option of `data`, whose validation problems are asked
    problems: int | None = None  # as eval_problems, which is its short name; null: eval_problems
    final_problems: int | None = None  # asked by the last evaluation of a training; null: `problems`, or else all
    samples: int | None = None  # responses per problem; null: 1

    def problems_of(self) -> list[str]:
        """What is wrong inside the group, whatever it is combined with."""
        bad = []
        if self.reward is not None and self.reward not in NAMED_REWARDS and not all(self.reward.partition(":")):
            bad.append(
                f"eval.reward={self.reward} is neither r1_zero nor question_only nor module:function: choose one, or "
                "null for the prompt's"
            )
        if self.prompt is not None:
            bad += _of_prompt(self.prompt)
        if self.data is not None:
            bad += [
                re.sub(r"(?<![\w./])data\.(?=[a-z])", "eval.data.", line) for line in asked_of(self.data).problems()
            ]
        return bad


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a run's evaluations ask and judge, nothing left open: what their protocol is made from."""

    prompt: Prompt
    reward: str  # decides what is correct
    prompt_reward: str | None  # grades beside it, where it is another
    grading: Grading
    sampling: Sampling
    data: Data
    problems: int | None  # of the evaluations on the way; None: all
    final_problems: int | None  # of the last one, or of a job that does not train
    samples: int  # responses per problem


def evaluation_of(run: Any) -> Evaluation:
    """The resolved settings of a run's evaluations. `run` is a `config.run.Run`, which has a group `eval`."""
    own: Eval = run.eval
    prompt = run.prompt if own.prompt is None else own.prompt
    reward = prompt.reward if own.reward is None else own.reward
    return Evaluation(
        prompt=prompt,
        reward=reward,
        prompt_reward=None if reward == prompt.reward else prompt.reward,
        grading=run.grading,
        sampling=sampling_of(run),
        data=run.data if own.data is None else asked_of(own.data),
        problems=min_of(run.problems_on_the_way, run.problems_at_the_end),  # which asks these again
        final_problems=run.problems_at_the_end,
        samples=run.answers,
    )


def min_of(one: int | None, other: int | None) -> int | None:
    """The smaller bound; None bounds nothing."""
    return min((bound for bound in (one, other) if bound is not None), default=None)


def sampling_of(run: Any) -> Sampling:
    """How evaluations sample: a number of `eval.sampling` where it is set, else the one of `sampling`."""
    own = run.eval.sampling
    numbers = {f.name: getattr(own, f.name) for f in fields(own)}
    return Sampling(**{k: getattr(run.sampling, k) if number is None else number for k, number in numbers.items()})


def asked_of(data: Data) -> Data:
    """The data of an evaluation alone: of files, nothing but what is asked need be there."""
    if not isinstance(data, FileData) or data.n_validation is not None:
        return data
    split = data.validation or next((name for name in ("validation", "test") if locate(data.path, name)), None)
    if split:
        data = copy(data)
        data.train = split
    return data


def complaints(run: Any) -> Iterator[str]:
    """What does not go together with the settings of the rest of the run, one line each."""
    own: Eval = run.eval
    yield from own.problems_of()
    if own.data is not None and isinstance(run.model, TinyModel) and not isinstance(own.data, Stories):
        yield (
            f"model=tiny with eval.data={own.data.name}: the tiny model knows nothing but stories: choose "
            "eval.data=stories or stories_hard, or a pretrained model (model=local model.path=DIR)"
        )
    if own.prompt is not None and own.prompt.chat and isinstance(run.model, TinyModel):
        yield (
            "eval.prompt.chat=true with model=tiny: a model made on the spot has no chat template: choose a pretrained "
            "model, or another eval.prompt"
        )
    most, last = run.asked_at_most, own.final_problems
    if most is not None and last is not None and last < most:
        yield (
            f"eval.final_problems={last} is less than eval.problems={most}, all of which it asks again: "
            "raise it, or lower eval.problems"
        )
    evaluation = sampling_of(run)
    given = {f.name for f in fields(own.sampling) if getattr(own.sampling, f.name) is not None}
    if evaluation.temperature == 0 and run.answers > 1:
        key = f"{'eval.' if 'temperature' in given else ''}sampling.temperature"
        count, single = run.counted
        yield (f"{key}=0 with {count}: the responses to a problem would all be equal: set {key}=1, or {single}")
    if not given:
        return
    shortest, longest = evaluation.min_tokens, evaluation.max_tokens
    if given & {"min_tokens", "max_tokens"} and not (0 <= shortest <= longest and longest >= 1):
        yield (
            f"eval.sampling.min_tokens={shortest}, eval.sampling.max_tokens={longest}: 0 <= min <= max and max >= 1 "
            "must hold (null: sampling's)"
        )


def _of_prompt(prompt: Prompt) -> list[str]:
    bad = []
    if "" in prompt.stop:
        bad.append("eval.prompt.stop holds an empty text, which stands everywhere: give stop strings, or []")
    if prompt.reward not in NAMED_REWARDS and ":" not in prompt.reward:
        bad.append(
            f"eval.prompt.reward={prompt.reward} is neither r1_zero nor question_only nor module:function: choose one"
        )
    return bad
