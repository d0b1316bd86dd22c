"""Constraints on settings: their ranges, their choices, and the comments that explain them."""

import ast
import inspect
import os
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import field, is_dataclass
from functools import cache
from typing import Any

from omegaconf import MISSING

from rlreason.config.leaves import leaves
from rlreason.objectives.losses import LOSSES, Loss
from rlreason.types import LARGE, Range

PROCESSORS = os.cpu_count() or 1
MOST_SIDE_BY_SIDE = max(64, PROCESSORS)  # threads, or processes: a run may be repeated on a machine with fewer
MAX_SEED = 2**63 - 1  # numpy's seeds are at least 0, torch's have at most 64 bits
MOST = 10**9  # steps, updates, tokens: more than any run makes, and within every counter
MADE = 10**6  # generated problems, and responses in one step: these are held in memory

SEED = Range(0, MAX_SEED, "try {key}=0")
SHARE = Range(0, 1, "it is a share")
STEPS = Range(1, MOST)
OR_NONE = Range(0, MOST)
RESPONSES = Range(1, MADE)


def ranges_of(losses: Mapping[str, Loss]) -> dict[str, Range]:
    """Return setting -> range of the losses' numbers; `ValueError` if two losses give one number different ranges."""
    found: dict[str, Range] = {}
    for name, loss in losses.items():
        for number, limits in loss.ranges.items():
            if found.setdefault(f"loss.{number}", limits) != limits:
                raise ValueError(f"loss {name}: another loss gives {number} another range: share it, or rename it")
    return found


RANGES: dict[str, Range] = {
    "seed": SEED,
    "threads": Range(1, MOST_SIDE_BY_SIDE, f"this machine has {PROCESSORS} processors, and null chooses"),
    "micro_batch_tokens": Range(1, MOST),
    "eval_problems": Range(1, MOST, "null asks all of them"),
    "interim_eval_problems": Range(1, MOST, "null asks all of them"),
    "eval.problems": Range(1, MOST, "null asks all of them"),
    "eval.final_problems": Range(1, MOST, "null asks all of them"),
    "eval.samples": Range(1, MADE, "each problem needs a response: try eval.samples=1"),
    "log_generations": Range(0, MADE),
    # training
    "learning_rate": Range(0, 1e30, above=True),
    "warmup_steps": OR_NONE,
    "weight_decay": Range(0, 1e30),
    "adam_betas": Range(0, 1, "try [0.9,0.95]", below=True),
    "max_grad_norm": Range(0, 1e30, above=True),
    "train_batch_size": RESPONSES,
    "micro_batch_size": Range(1, MADE, "null lets micro_batch_tokens decide"),
    "gradient_accumulation_steps": Range(1, MADE, "null lets micro_batch_tokens decide"),
    "eval_every": OR_NONE,
    "save_rollouts_every": OR_NONE,
    "n_steps": STEPS,
    "checkpoint.every": Range(0, MOST, "null lets the run decide, and 0 writes none"),
    "checkpoint.keep": Range(1, MOST, "the newest has to stay: try 2"),
    "epochs": Range(0, LARGE, above=True),
    # GRPO and expert iteration
    "loss.cliprange": Range(0, LARGE, above=True),
    **ranges_of(LOSSES),
    "length_norm.constant": Range(
        0,
        MOST,
        "the loss is divided by it: give the length of a long response in tokens, or null for sampling.max_tokens",
        above=True,
    ),
    "advantage_eps": Range(0, LARGE),
    "kl_coef": Range(0, LARGE),
    "entropy_coef": Range(0, LARGE, "above 0 it rewards entropy"),
    "overlong_cache": Range(1, MOST, "null takes a fifth of sampling.max_tokens"),
    "mismatch_cap": Range(1, LARGE, "it is the largest weight: 2.0 is usual"),
    "rollout_batch_size": RESPONSES,
    "question_batch_size": RESPONSES,
    "group_size": RESPONSES,
    "epochs_per_rollout": Range(1, LARGE, "each rollout batch is used at least once: try 1"),
    "max_resampling_rounds": Range(0, LARGE),
    "skip_solved": Range(0, MOST, "0 leaves no question out"),
    "sft_epochs": Range(1, LARGE),
    "max_per_question": Range(1, MADE, "null keeps all that are correct"),
    # jobs that do not train
    "samples": Range(1, MADE, "each problem needs a response: try samples=1"),
    "n_list": Range(1, MADE, "try n_list=[1,4,8]"),
    # discovery
    "replies": Range(1, 256, "try replies=4"),
    "history": Range(0, MADE, "0 shows the first and the best alone: try 4"),
    "restart_after": Range(1, MADE, "null never begins anew"),
    "client.temperature": Range(0, 10, "null leaves it to the endpoint"),
    "client.max_tokens": Range(16, MOST, "a program needs some thousands: try 16384"),
    "client.timeout_s": Range(0.1, 86400, "try 600"),
    "client.retries": Range(0, 100, "0 asks once"),
    "client.pause_s": Range(0, 600, "try 2"),
    "client.prompt_price": Range(0, LARGE),
    "client.completion_price": Range(0, LARGE),
    "score.timeout_s": Range(0.1, 7 * 86400, "try 600"),
    "score.check_timeout_s": Range(0.1, 7 * 86400, "try 120"),
    "score.memory_mb": Range(64, 2**20, "Python and numpy need about 100: try 2048"),
    "score.workers": Range(1, MOST_SIDE_BY_SIDE, f"this machine has {PROCESSORS} processors: try 2"),
    "score.cpus": Range(1, 1024, "try 2"),
    # groups
    "sampling.temperature": Range(0, LARGE, "try 1.0"),
    "sampling.min_tokens": OR_NONE,
    "sampling.max_tokens": STEPS,
    "grading.timeout_s": Range(0.01, 60, "2 seconds are enough for honest answers"),
    "grading.start_timeout_s": Range(1, 3600, "a busy machine may need 60"),
    "grading.rel_tol": Range(0, 0.1, "1e-6 asks for six right digits", below=True),
    "grading.correct_at": Range(0, LARGE, "try 1.0: at 0 everything counts as correct", above=True),
    "grading.workers": Range(1, MOST_SIDE_BY_SIDE, f"this machine has {PROCESSORS} processors: try 1"),
    "grading.memory_mb": Range(256, 2**20, "the symbolic library needs about 100: try 1536"),
    "waits.run_s": Range(1, 1e6, "null waits for ever: try 3600"),
    "monitors.gradient_norm_factor": Range(1, LARGE, "try 20", above=True),
    "monitors.gradient_norm_after": Range(1, MOST, "a median needs some steps: try 10"),
    "monitors.kl_factor": Range(1, LARGE, "try 20", above=True),
    "monitors.kl_above": Range(0, LARGE, "try 0.1"),
    "monitors.kl_after": Range(1, MOST, "a median needs some steps: try 10"),
    "monitors.first_ratio_bound": Range(0, LARGE, "try 0.05", above=True),
    "monitors.still_weights_below": SHARE,
    "monitors.still_weights_steps": Range(1, MOST, "try 3"),
    "monitors.entropy_below": Range(0, LARGE, "try 0.005", above=True),
    "monitors.no_live_group_steps": Range(1, MOST, "try 10"),
    "monitors.zero_reward_steps": Range(1, MOST, "try 10"),
    "monitors.truncated_above": SHARE,
    "monitors.length_factor": Range(1, LARGE, "try 4", above=True),
    "monitors.length_after": Range(1, MOST, "a median needs some steps: try 3"),
    "monitors.round_trip_below": SHARE,
    "monitors.same_answer_above": SHARE,
    "monitors.reward_hacking_after": Range(1, MOST, "medians need some steps: try 5"),
    "monitors.reward_hacking_gain": Range(0, LARGE, "try 0.1", above=True),
    "monitors.engine_weights_factor": Range(1, LARGE, "try 10", above=True),
    "monitors.engine_weights_above": Range(0, LARGE, "try 2e-5"),
    "monitors.parity_bound": Range(0, LARGE, "try 0.05", above=True),
    "budget.hours": Range(0, LARGE, "null sets no bound", above=True),
    "budget.tokens": Range(1, MOST * MOST, "null sets no bound"),
    "budget.calls": Range(1, MADE, "null sets no bound"),
    "budget.cost": Range(0, LARGE, "null sets no bound", above=True),
    "budget.steps": Range(1, MOST, "null sets no bound"),
    "rollout.max_rows": Range(1, MADE, "try 256"),
    "rollout.async_level": Range(0, 1),
    "rollout.gpus": Range(1, 16, "engines are those of one machine: try 1"),
    "rollout.kv_cache_gb": Range(0, LARGE, "null lets it be planned", above=True),
    "rollout.timeout_s": Range(0.1, 1e6, "try 600"),
    "model.width": Range(1, 1024, "it is a tiny model: try 128"),
    "model.layers": Range(1, 32, "it is a tiny model: try 2"),
    "model.heads": Range(1, 64, "try 4"),
    "model.warm_start.steps": Range(0, 10**6, "0 leaves it out"),
    "model.warm_start.batch_size": Range(1, 2**16, "try 64"),
    "model.warm_start.learning_rate": Range(0, 1e30, "try 3e-3", above=True),
    "model.warm_start.hasty_share": SHARE,
    "model.warm_start.slip_share": SHARE,
    "model.lora.rank": Range(0, 2**16, "0 trains without adapters"),
    "model.lora.alpha": Range(0, LARGE, "try 32", above=True),
    # data
    "data.limit": Range(1, MOST, "null uses every problem"),
    "data.min_pass_rate": SHARE,
    "data.max_pass_rate": SHARE,
    "data.seed": SEED,
    "data.split_seed": SEED,
    "data.n_train": RESPONSES,
    "data.n_validation": RESPONSES,
    "data.min_events": Range(1, 99),
    "data.max_events": Range(1, 99),
    "data.max_value": Range(1, MADE),
    "data.wrong_share": SHARE,
    "data.habits.hasty_share": SHARE,
    "data.habits.slip_share": SHARE,
    "data.habits.stop_share": SHARE,
    "data.habits.taught_max_events": Range(1, 99, "null shows all"),
    "data.habits.ramble_share": SHARE,
    "data.habits.ramble_steps": Range(1, 99),
    "data.habits.guess_share": SHARE,
    "data.max_target": Range(1, MOST),
    "data.min_count": Range(2, 10),
    "data.max_count": Range(2, 10),
    "data.max_chars": Range(1, MOST),
}


def range_of(key: str) -> Range | None:
    """Return a setting's range; a group inside another group keeps the ranges it has outside.

    >>> range_of("eval.sampling.max_tokens") is RANGES["sampling.max_tokens"], range_of("prompt.file")
    (True, None)
    """
    return RANGES.get(key) or RANGES.get(key.partition(".")[2])


def out_of_range(settings: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[str]:
    """Return complaints about numbers, one line each; every member of a list counts. Keys are dotted.

    >>> out_of_range({"grading.workers": 0, "grading.extract": "strict", "threads": None})[0].partition(":")[0]
    'grading.workers=0 must be at least 1'
    """
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    return [line for key, value in pairs if (line := _complaint(key, value))]


def _complaint(key: str, value: Any) -> str:
    members = value if isinstance(value, list) else [value]
    numbers = [n for n in members if isinstance(n, int | float) and not isinstance(n, bool)]
    bounds = range_of(key)
    if bounds is None or not numbers:
        return ""
    rule = next((rule for number in numbers if (rule := bounds.broken_by(number))), "")
    if not rule:
        return ""
    cure = "give a number" if rule == "must be finite" else bounds.cure.format(key=key)
    shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    return f"{key}={_short(shown)} {rule}" + (f": {cure}" if cure else "")


def _short(number: str) -> str:
    return number if len(number) <= 40 else f"{number[:20]}...({len(number)} digits)"


def choice(*words: str, default: str | None = MISSING, cure: str = "choose one") -> Any:
    """Define a settings field with these choices; `cure` ends the complaint about any other value."""
    return field(default=default, metadata={"choices": words, "cure": cure})


def wrong_choices(settings: Any, prefix: str = "") -> list[str]:
    """Return complaints about settings with a value that is no choice, one line each. null is left to the type.

    >>> from rlreason.config.groups import RolloutConfig
    >>> wrong_choices(RolloutConfig(engine="sglang"), "rollout.")
    ['rollout.engine=sglang is none of hf, vllm: choose one']
    """
    return [
        f"{leaf.key}={leaf.value} is none of {', '.join(leaf.metadata['choices'])}: {leaf.metadata['cure']}"
        for leaf in leaves(settings, prefix)
        if leaf.value is not None and leaf.value not in leaf.metadata.get("choices", (leaf.value,))
    ]


def comment(kind: type, name: str) -> str:
    """Return the comment on a field, from the first class in the hierarchy that has one; "" if none has.

    >>> from rlreason.config.groups import SamplingConfig
    >>> comment(SamplingConfig, "max_tokens")
    'responses are truncated here'
    """
    comments = (_comments(base).get(name, "") for base in reversed(kind.__mro__) if is_dataclass(base))
    return next(filter(None, comments), "")


@cache
def _comments(kind: type) -> dict[str, str]:
    try:
        lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    except OSError:  # classes made by a call
        return {}
    comments = {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("# ")[2]
            above = node.lineno - 2
            while lines[above].lstrip().startswith("# "):
                comment = f"{lines[above].lstrip('# ')} {comment}"
                above -= 1
            comments[node.target.id] = comment.strip()
    return comments
