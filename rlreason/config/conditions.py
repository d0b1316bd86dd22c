"""When a setting is read, in one table; setting one that nothing reads is refused."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rlreason.config.algorithms import SIDE_BY_SIDE
from rlreason.config.data import (
    CountdownConfig,
    DataConfig,
    FileDataConfig,
    FunctionDataConfig,
    GymConfig,
    HabitsConfig,
    StoriesConfig,
)
from rlreason.config.groups import MODES, OF_JOBS, OF_SWEEPS, SamplingConfig, limits_of
from rlreason.config.leaves import leaves
from rlreason.config.run import (
    Condition,
    RunConfig,
    checks_ground_truths,
    is_own,
    judges,
    on_several_ranks,
    warms_up_alone,
)
from rlreason.objectives.losses import loss_named
from rlreason.objectives.objective import LOSS_NUMBERS, readers

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


def _is_on(monitor: str) -> Callable[[Any], bool]:
    return lambda run: getattr(run.monitors, monitor) != "off"


MONITOR_CONDITIONS = (
    Condition(
        tuple(
            f"monitors.{key}"
            for name in MODES
            if name not in (*OF_JOBS, *OF_SWEEPS)
            for key in (name, *limits_of(name))
        ),
        lambda run: run.trains,
        "by algorithms that train only",
    ),
    Condition(
        tuple(f"monitors.{name}" for name in OF_SWEEPS),
        lambda run: False,
        "by a sweep only, which stops a setting that another one surely beats",
        "start a sweep with -m, or leave it out",
    ),
    *(
        Condition(
            tuple(f"monitors.{key}" for key in limits_of(name)),
            _is_on(name),
            f"where monitors.{name} is not off only",
            f"set monitors.{name}=warn, or leave it out",
        )
        for name in MODES
        if limits_of(name)
    ),
)


DISCOVER_CONDITIONS = (
    Condition(
        ("replies",),
        lambda run: run.strategy in SIDE_BY_SIDE,
        "by strategy=best_of_n and strategy=hybrid only",
    ),
    Condition(
        ("history", "restart_after", "prompts.error", "prompts.extend", "prompts.no_code"),
        lambda run: run.converses,
        "by strategy=refine and strategy=hybrid only",
    ),
)


def _loss_reads(key: str) -> Callable[[Any], bool]:
    return lambda run: key in loss_named(run.loss.loss_type).numbers


def _leaves_to_the_data(key: str) -> Callable[[Any], bool]:
    return lambda run: not run.model.made_on_the_spot or getattr(run.model.warm_start, key) is None


CONDITIONS = (
    Condition(
        ("model.gradient_checkpointing", "model.freeze", "model.lora.rank", "model.lora.alpha", "model.lora.targets"),
        lambda run: run.trains,
        "by algorithms that train only",
    ),
    Condition(
        ("model.lora.alpha", "model.lora.targets"),
        lambda run: run.model.lora.rank > 0,
        "with model.lora.rank above 0 only, and rank 0 trains every weight",
        "set model.lora.rank=8, or leave it out",
    ),
    Condition(
        (
            "model.cache",
            *(f"model.warm_start.{key}" for key in ("batch_size", "learning_rate", "hasty_share", "slip_share")),
        ),
        lambda run: run.model.warm_start.steps > 0,
        "with model.warm_start.steps above 0 only",
    ),
    Condition(
        tuple(leaf.key for leaf in leaves(HabitsConfig(), "data.habits.")),
        lambda run: run.model.made_on_the_spot and run.model.warm_start.steps > 0,
        "by the warm start of a model made on the spot only",
        "leave it out, or choose model=tiny",
    ),
    *(
        Condition(
            (f"data.habits.{key}",),
            _leaves_to_the_data(key),
            f"where model.warm_start.{key} is null only",
            "set one of them",
        )
        for key in ("hasty_share", "slip_share")
    ),
    Condition(
        tuple(f"data.{key}" for key in ("limit", "filter", "pass_rates", "min_pass_rate", "max_pass_rate", "overlap")),
        lambda run: run.uses_training_data,
        "where training data is used only, and split=validation uses none",
        "leave it out (eval_problems says how many are asked), or set split=train",
    ),
    Condition(
        ("data.min_pass_rate", "data.max_pass_rate"),
        lambda run: run.data.pass_rates is not None,
        "together with data.pass_rates only",
        "give data.pass_rates=FILE, which algorithm=evaluate writes, or leave it out",
    ),
    Condition(
        ("data.response_as", "data.wrong_share"),
        lambda run: run.reads_traces,
        "by algorithm=sft and by data.filter=correct on training data only",
    ),
    Condition(
        ("prompt.trace",),
        lambda run: run.reads_traces or warms_up_alone(run),
        "by algorithm=sft, by data.filter=correct on training data and by the tiny model's warm start, unless that is "
        "the one that several prompts share, only",
    ),
    Condition(
        ("prompt.system", "prompt.enable_thinking"),
        lambda run: run.prompt.chat,
        "with a chat template only",
        "choose prompt=chat, or leave it out",
    ),
    Condition(
        ("data.split_seed",),
        lambda run: run.data.holds_out,
        "with data.n_validation only, which holds that many problems out",
        "set data.n_validation=200 data.validation=null, or leave it out",
    ),
    Condition(
        ("data.validation",),
        lambda run: run.data.n_validation is None,
        "without data.n_validation only",
        "set one of them to null",
    ),
    Condition(
        ("data.hub_config",),
        lambda run: run.data.on_hub,
        "for a data set of the hub only, not for files",
        "set it to null",
    ),
    Condition(
        tuple(f"data.{key}" for key in ("seed", "min_count", "max_count", "max_value", "max_target")),
        lambda run: getattr(run.data, "path", None) is None,
        "where problems are made up only, not where data.path gives them",
        "leave it out, or set data.path=null",
    ),
    Condition(
        ("data.verifier",),
        lambda run: any(data is run.data and ":" not in reward for reward, data in judges(run)),
        "without a prompt.reward=module:function only",
    ),
    Condition(
        ("data.bad_gold",),
        checks_ground_truths,
        "by the built-in comparison of what is asked or learned from only",
    ),
    Condition(
        ("grading.extract", "grading.percent", "grading.rel_tol"),
        lambda run: not all(is_own(*named) for named in judges(run)),
        "by the built-in comparison only, not where prompt.reward or data.verifier names a function that judges",
    ),
    Condition(
        ("grading.correct_at",),
        lambda run: any(is_own(*named) for named in judges(run)),
        "by a reward of one's own only, which may give partial credit",
        "leave it out, or set prompt.reward=module:function",
    ),
    Condition(
        ("interim_eval_problems",),
        lambda run: run.problem_limit is None,
        "where eval_problems is null only, which otherwise bounds every evaluation",
        "set eval_problems=null, or leave it out",
    ),
    Condition(
        tuple(f"rollout.{key}" for key in ("gpus", "placement", "sleep", "kv_cache_gb", "attest", "timeout_s")),
        lambda run: run.rollout.engine == "vllm",
        "by rollout=vllm only",
        "choose it too, or leave this out",
    ),
    Condition(
        ("parallel",),
        on_several_ranks,
        "where several ranks train only",
        "set gpus=2, or leave it out",
    ),
    Condition(
        ("rollout.compile",),
        lambda run: run.rollout.engine == "hf",
        "by rollout=hf only",
        "choose it too, or leave this out",
    ),
    Condition(
        ("rollout.sleep",),
        lambda run: run.rollout.shares_gpu,
        "where vLLM shares the policy's GPU only (rollout.placement=colocate)",
    ),
    Condition(("rollout.async_level",), lambda run: run.trains, "by algorithms that train only"),
    Condition(
        ("logger.project", "logger.group", "logger.name"),
        lambda run: run.logger.wandb or run.logger.trackio,
        "by logger=wandb and logger=trackio only",
        "choose one of them too, or leave this out",
    ),
    Condition(
        ("logger.mode", "logger.entity", "logger.tags", "logger.notes"),
        lambda run: run.logger.wandb,
        "by logger=wandb only",
        "choose it too, or leave this out",
    ),
    Condition(
        ("save_rollouts_every",),
        lambda run: run.samples_to_learn,
        "where responses are sampled to learn from only, and algorithm=sft samples none",
    ),
    Condition(
        ("length_norm.constant",),
        lambda run: run.length_norm.kind == "constant",
        "by length_norm=constant only",
        "set it to null, or choose length_norm=constant",
    ),
    Condition(
        ("advantage_eps",),
        lambda run: run.std_norm != "none",
        "by what std_norm divides by only, and std_norm=none divides by nothing",
        "leave it out, or choose std_norm=group_std",
    ),
    Condition(
        ("kl_estimator", "kl_coef"),
        lambda run: run.kl_placement != "none",
        "with a KL term only",
        "leave it out, or set kl_placement=loss kl_coef=0.01",
    ),
    Condition(
        ("overlong_cache",),
        lambda run: run.overlong == "penalty",
        "by overlong=penalty only",
        "set it to null, or overlong=penalty",
    ),
    Condition(
        ("mismatch", "mismatch_cap"),
        lambda run: not run.old_from_engine,
        "where the trainer scores what was sampled only; with rollout.async_level=1 a loss's ratio starts from the "
        "engine's log-probabilities and covers the train-inference mismatch, so every weight would be exactly 1",
    ),
    Condition(
        ("mismatch_cap",),
        lambda run: run.mismatch != "none",
        "with mismatch=truncate or mismatch=mask only",
        "set it to null, or mismatch=truncate",
    ),
    Condition(
        ("loss.cliprange",),
        lambda run: run.loss.cliprange_low is None or run.loss.cliprange_high is None,
        "for a side that is null only, and loss.cliprange_low and loss.cliprange_high are set",
        "set the two sides, or set both to null",
    ),
    *(
        Condition(keys, _loss_reads(key), f"by {' and '.join(losses)} only", f"choose {' or '.join(losses)}")
        for key in LOSS_NUMBERS
        if (losses := [f"loss={name}" for name in readers(key)])
        and (keys := ("loss.cliprange", f"loss.{key}") if key == "cliprange_low" else (f"loss.{key}",))
    ),
    *DISCOVER_CONDITIONS,
    *EVAL_CONDITIONS,
    *MONITOR_CONDITIONS,
)
