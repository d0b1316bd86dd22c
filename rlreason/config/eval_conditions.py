"""When the settings of evaluations are read, and those of training that `eval` leaves unread.

A part of the table in `conditions.py`, which explains its purpose.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rlreason.config.data import (
    CountdownConfig,
    DataConfig,
    FileDataConfig,
    FunctionDataConfig,
    GymConfig,
    HabitsConfig,
    StoriesConfig,
)
from rlreason.config.groups import SamplingConfig
from rlreason.config.leaves import leaves
from rlreason.config.run import Condition, RunConfig, is_own, judges, warms_up_alone

DATA_KEYS = tuple(
    dict.fromkeys(
        leaf.key
        for kind in (DataConfig, StoriesConfig, FileDataConfig, CountdownConfig, GymConfig, FunctionDataConfig)
        for leaf in leaves(kind(), "data.")
    )
)


def _uses_data(run: RunConfig) -> bool:
    """Whether problems of `data` are learned from, evaluated, or teach the tiny model."""
    return run.uses_training_data or run.eval.data is None or run.model.made_on_the_spot


def _learns_or_asks(key: str) -> Callable[[Any], bool]:
    """Whether training uses `key`, or a job whose `eval` settings leave it to `key`."""

    def read(run: RunConfig) -> bool:
        own = run.eval.prompt if key == "prompt" else getattr(run.eval.sampling, key)
        return own is None or run.trains

    return read


EVAL_CONDITIONS = (
    Condition(
        ("eval.data.verifier",),
        lambda run: any(data is not run.data and ":" not in reward for reward, data in judges(run)),
        "without a reward=module:function only",
    ),
    Condition(
        ("eval.data.bad_gold",),
        lambda run: not is_own(*judges(run)[0]),
        "by the built-in comparison only, not where eval.reward or a prompt's names a function that judges",
    ),
    Condition(
        ("eval_problems",),
        lambda run: run.eval.problems is None,
        "without eval.problems only, whose short name it is",
        "set one of them",
    ),
    Condition(
        ("eval.final_problems",),
        lambda run: run.trains,
        "by algorithms that train only, whose last evaluation may ask more",
        "set eval.problems",
    ),
    Condition(
        ("eval.card",),
        lambda run: run.trains,
        "by algorithms that train only",
    ),
    Condition(
        ("eval.samples",),
        lambda run: run.reads_eval_samples,
        "by every algorithm but best_of_n only, which samples as many as n_list asks for",
        "set samples, or leave it out",
    ),
    Condition(
        ("eval.samples",),
        lambda run: getattr(run, "samples", None) is None,
        "without samples only, which is its short name",
        "set one of them",
    ),
    Condition(
        ("eval.data.train",),
        lambda run: run.eval.data.n_validation is not None,
        "with eval.data.n_validation only, not where its validation problems are a file of their own",
    ),
    Condition(
        ("eval.prompt.trace",),
        lambda run: run.eval.prompt.file != run.prompt.file and warms_up_alone(run, run.eval.prompt),
        "by the tiny model's warm start, unless that is the one that several prompts share, only",
    ),
    Condition(
        ("eval.prompt.system", "eval.prompt.enable_thinking"),
        lambda run: run.eval.prompt.chat,
        "with a chat template only",
        "choose eval.prompt=chat, or leave it out",
    ),
    Condition(
        ("prompt.stop", "prompt.name", "prompt.chat", "prompt.system", "prompt.enable_thinking"),
        _learns_or_asks("prompt"),
        "by algorithms that train, and where eval.prompt is null, only",
        "set it under eval.prompt",
    ),
    Condition(
        ("prompt.file",),
        lambda run: _learns_or_asks("prompt")(run) or run.model.made_on_the_spot,
        "by algorithms that train, and where eval.prompt is null, only",
        "set it under eval.prompt",
    ),
    Condition(
        ("prompt.reward",),
        lambda run: run.eval.prompt is None or run.judges_to_learn or run.model.made_on_the_spot,
        "where responses are sampled to learn from, and where eval.prompt is null, only",
        "set it under eval.prompt",
    ),
    *(
        Condition(
            (f"sampling.{key}",),
            _learns_or_asks(key),
            f"by algorithms that train, and where eval.sampling.{key} is null, only",
            "set one of them",
        )
        for key in (field.name for field in fields(SamplingConfig))
    ),
    Condition(
        ("data.name",),
        lambda run: run.trains or run.eval.data is None,
        "by algorithms that train, and where eval.data is null, only",
    ),
    Condition(
        DATA_KEYS,
        _uses_data,
        "by algorithms that train, and where eval.data is null, only",
        "set it under eval.data",
    ),
    Condition(
        ("eval.data.split_seed",),
        lambda run: run.eval.data.holds_out,
        "with eval.data.n_validation only, which holds that many problems out",
    ),
    Condition(
        tuple(
            f"eval.data.{key}"
            for key in (
                *("limit", "filter", "pass_rates", "min_pass_rate", "max_pass_rate", "overlap", "response_as"),
                "wrong_share",
                *(leaf.key for leaf in leaves(HabitsConfig(), "habits.")),
            )
        ),
        lambda run: False,
        "for training data only, and what an evaluation's own data holds is asked",
        "set it under data, or leave it out",
    ),
)
