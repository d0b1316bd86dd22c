"""Run a train loop, or the train step of 2026, on a small model with recording parts, and have its runs judged.

    train_grpo(policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, ...)

`docs/check.md` documents the signature.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rlreason.courses.check.calling import answer_parts, call, tensor
from rlreason.courses.check.loop_judge import LOSS, bug_of_run
from rlreason.courses.check.recording import OUTSIDE, Scenario, Session
from rlreason.courses.check.records import RAISES, Bug, Fault, Function, NotWrittenError, their_error

_SETTINGS: dict[str, Any] = {
    "n_grpo_steps": 2,
    "rollout_batch_size": 12,
    "group_size": 4,
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "epochs_per_rollout_batch": 1,
    "sampling_temperature": 0.7,
    "sampling_max_tokens": 6,
    "loss_type": "reinforce_with_baseline",
    "cliprange": 0.2,
    "advantage_eps": 1e-6,
    "use_std_normalization": True,
    "max_grad_norm": 1e6,
    "seed": 0,
}
SCENARIOS = (
    Scenario("on-policy, 3 questions x 4 responses, 3 micro-batches, temperature 0.7", _SETTINGS, flat=True),
    Scenario(
        "off-policy: 2 epochs, 2 updates each, grpo_clip 0.1, temperature 1.3, no std, max_grad_norm 0.05",
        _SETTINGS
        | {"train_batch_size": 6, "gradient_accumulation_steps": 2, "epochs_per_rollout_batch": 2, "cliprange": 0.1}
        | {"loss_type": "grpo_clip", "sampling_temperature": 1.3, "use_std_normalization": False}
        | {"max_grad_norm": 0.05, "seed": 1},
        learning_rate=8.0,
    ),
    Scenario(
        "advantage_eps 0.5, 6 questions x 2 responses, 2 updates, no micro-batches, some questions of one answer",
        _SETTINGS
        | {"group_size": 2, "train_batch_size": 6, "gradient_accumulation_steps": 1, "advantage_eps": 0.5}
        | {"sampling_temperature": 0.9, "seed": 2},
        answers=5,
    ),
    Scenario(
        "a rollout batch of 16 in train batches of 12, each in 2 micro-batches: 4 responses are left for the last",
        _SETTINGS | {"rollout_batch_size": 16, "gradient_accumulation_steps": 2, "n_grpo_steps": 1, "seed": 3},
        may_be_refused=True,
        any_divisor=True,
    ),
    Scenario(
        "a train batch of 8 in 3 micro-batches, which do not divide it",
        _SETTINGS | {"rollout_batch_size": 8, "train_batch_size": 8, "n_grpo_steps": 1, "seed": 4},
        may_be_refused=True,
        any_divisor=True,
    ),
)
_SIZES = ("rollout_batch_size", "group_size", "train_batch_size", "epochs_per_rollout_batch", "sampling_max_tokens")
_BATCH = {name: _SETTINGS[name] for name in (*_SIZES, "max_grad_norm")}
_BATCH |= {"n_grpo_steps": 1, "gradient_accumulation_steps": 2}
STEP_SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 5},  # does not divide the rows, which a step may refuse
    {"max_grad_norm": 0.05},
    {"advantage_eps": 0.5},
    {"loss_normalization": "constant", "normalization_constant": 40, "advantage_normalizer": "none"},
    {"baseline": "none", "advantage_normalizer": "none"},
    {"advantage_normalizer": "mean", "advantage_eps": 0.1},
    {"importance_reweighting_method": "noclip"},
    {"importance_reweighting_method": "grpo", "cliprange": 0.1},
    {"importance_reweighting_method": "gspo", "cliprange": 0.02},
)


def check_loop(function: Function, notes: list[str]) -> list[Bug]:
    """Return the bug of a train loop that the first scenario shows; add scenarios not tried to `notes`."""
    return _check(function, SCENARIOS, notes)


def check_step(function: Function, notes: list[str]) -> list[Bug]:
    """Return the bug of a train step that the first of `STEP_SETTINGS` shows; add settings not tried to `notes`."""
    scenarios = [
        Scenario(
            ", ".join(f"{name}={value}" for name, value in settings.items()),
            _BATCH | settings,
            may_be_refused=12 % settings.get("gradient_accumulation_steps", 1) > 0,
            answers=2,
            is_step=True,
        )
        for settings in STEP_SETTINGS
    ]
    return _check(_as_loop(function), scenarios, notes)


def _as_loop(step: Function) -> Function:
    """Return a loop of one step around the train step."""

    def train(
        policy: Any, tokenizer: Any, prompts: Any, ground_truths: Any, reward_fn: Any, generate: Any, optimizer: Any,
        *, n_grpo_steps: int, rollout_batch_size: int, train_batch_size: int, epochs_per_rollout_batch: int,
        sampling_max_tokens: int, group_size: int, **settings: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        n_prompts = rollout_batch_size // group_size
        rollouts = generate(prompts[:n_prompts], n=group_size, max_tokens=sampling_max_tokens)
        arguments = {
            "model": policy,
            "tokenizer": tokenizer,
            "optimizer": optimizer,
            "reward_fn": reward_fn,
            "repeated_prompts": [r.prompt for r in rollouts],
            "rollout_responses": [r.text for r in rollouts],
            "repeated_ground_truths": [truth for truth in ground_truths[:n_prompts] for _ in range(group_size)],
            "group_size": group_size,
            **settings,
        }
        if "importance_reweighting_method" in settings:
            width = max(len(r.prompt_ids) + len(r.token_ids) for r in rollouts) - 1
            arguments["old_log_probs"] = torch.full((len(rollouts), width), OUTSIDE)
            for row, r in zip(arguments["old_log_probs"], rollouts, strict=True):
                first = len(r.prompt_ids) - 1
                row[first : first + len(r.log_probs)] = torch.tensor(r.log_probs)
        loss, metadata = answer_parts(call(step, arguments), ("loss", "metadata"))
        return [{**metadata, LOSS: float(tensor(loss, "the loss", scalar=True))}]

    return train


def _check(function: Function, scenarios: Sequence[Scenario], notes: list[str]) -> list[Bug]:
    """Return the bug that the first scenario shows, or []; `NotWrittenError` if nothing is written yet."""
    for scenario in scenarios:
        session, failure, metrics = Session(scenario), None, None
        is_unwritten = False
        try:
            metrics = session.run(function)
            is_unwritten = metrics is None and not session.calls and not session.updates
        except BaseException as error:  # also SystemExit: it is the user's loop
            is_unwritten = isinstance(error, NotImplementedError | NotWrittenError) and not session.updates
            raised = Bug(*RAISES, their_error(error), "a run to its end")
            failure = error.bug if isinstance(error, Fault) else raised
        if is_unwritten and scenario is scenarios[0]:
            raise NotWrittenError
        if failure and scenario.may_be_refused and not session.updates:
            notes.append(f"not tried, as it is refused: {scenario.about} ({failure.yours})")
        elif bug := bug_of_run(session, failure, metrics, notes):
            return [bug.with_inputs({"scenario": scenario.about})]
    return []
