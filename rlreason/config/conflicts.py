"""Rules between settings that several classes share, or that other packages ask too.

Each yields a sentence for each broken rule: the settings with their values, the rule and the cure. A class has its own
in `rules`; what a single field says of itself is in config/rules.py.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlreason.config.leaves import locate, may_be_hub_name
from rlreason.errors import Absent
from rlreason.runtime.plugins import no_reward

if TYPE_CHECKING:
    from rlreason.config import data, run, training

Broken = Iterator[str]


def not_multiple(run: Any, larger: str, smaller: str) -> Broken:
    """Complain if one setting is no positive multiple of another; both by their names."""
    a, b = getattr(run, larger), getattr(run, smaller)
    if b <= 0 or a < b or a % b:
        yield f"{larger}={a} must be a positive multiple of {smaller}={b}: change one of them"


def as_eval(group: str, text: str, settings: Any) -> str:
    """Rewrite a text about `prompt` or `data` settings for `eval.prompt` or `eval.data`, which have the same keys.

    >>> from rlreason.config.data import StoriesConfig
    >>> as_eval("data", "data.n_train=0 in data.jsonl", StoriesConfig())
    'eval.data.n_train=0 in data.jsonl'
    """
    names = "|".join(f.name for f in fields(settings))
    return type(text)(re.sub(rf"(?<![\w./]){group}(?=\.(?:{names})\b|=)", f"eval.{group}", text))


def sampling_key(run: "run.RunConfig", name: str) -> str:
    """Return the setting that a number of evaluations' sampling comes from, as it is typed."""
    return f"{'eval.' if getattr(run.eval.sampling, name) is not None else ''}sampling.{name}"


def nothing_to_evaluate(data: "data.FileDataConfig") -> str:
    """Return the complaint about a folder of files with nothing to evaluate on."""
    return (
        f"data.path={data.path} holds neither validation nor test: name data.validation, or set data.n_validation=200"
    )


def absent_file(data: "data.FileDataConfig", key: str, split: str | None) -> Broken:
    """Complain about a missing file; what a hub holds is checked when it is read."""
    if split is None or locate(data.path, split):
        return
    if data.path is None or Path(split).suffix:
        yield Absent(f"data.{key}={split} is no .jsonl or .json file: give one, or a folder as data.path")
    elif Path(data.path).expanduser().is_dir():
        yield f"data.path={data.path} holds no {split}.jsonl: give another folder, or a file as data.{key}"
    elif not may_be_hub_name(data.path):
        cure = f"give a folder with {split}.jsonl, a hub name, or files as data.train and data.validation"
        yield Absent(f"data.path={data.path} is no folder: {cure}")


def of_evaluation(run: "run.RunConfig") -> Broken:
    """Check the group `eval` by itself and against the run's other settings."""
    prompt, data, last = run.eval.prompt, run.eval.data, run.eval.final_problems
    if run.eval.reward is not None:
        yield from no_reward("eval.reward", run.eval.reward, "choose one, or null for the prompt's")
    if prompt is not None:
        yield from (as_eval("prompt", line, prompt) for line in prompt.problems())
    if data is not None:
        yield from (as_eval("data", line, data) for line in data.evaluation_problems())
    for key, most in run.bounds().items():
        of_scale = key == "interim_eval_problems" and key not in run.given  # an upper bound
        if most is not None and last is not None and last < most and not of_scale:
            yield f"eval.final_problems={last} is less than {key}={most}, all of which it asks again: raise it"
    sampling, own = run.evaluation.sampling, run.eval.sampling
    if sampling.temperature == 0 and run.answers > 1:
        key = sampling_key(run, "temperature")
        yield f"{key}=0: the {run.answers} responses to a problem would all be equal: set {key}=1, or ask for one each"
    shortest, longest = sampling.min_tokens, sampling.max_tokens
    given = own.min_tokens is not None or own.max_tokens is not None
    if given and 1 <= longest < shortest:  # each number by itself has a range
        low, high = sampling_key(run, "min_tokens"), sampling_key(run, "max_tokens")
        yield f"{low}={shortest} is above {high}={longest}: set eval.sampling.min_tokens={longest} or less"


def of_schedule(run: "training.TrainingConfig", n_steps: int) -> Broken:
    """Complain about a learning rate that never reaches its peak in this many steps."""
    whole = 1 if run.restarts else n_steps  # steps of one schedule
    if run.warmup_steps > whole:
        anew = ", and restart=true starts the rate anew in each step" if run.restarts else ""
        yield f"warmup_steps={run.warmup_steps} is more than the {n_steps} steps of the run{anew}: lower it"
