"""A train loop as `rlreason check` takes it, made of the project's own parts: GRPO with `training.learner.Learner`.

In this folder, python -m rlreason check own_loop.py says whether it is right. It learns from the token ids that were
sampled, as every loop should.
"""

from dataclasses import replace
from typing import Any

import torch

from rlreason.config.training import OptimizationConfig
from rlreason.model.policy import Policy
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective
from rlreason.training.learner import Learner
from rlreason.types import Grade, Response, Sample


def train_grpo(
    policy: Any,
    tokenizer: Any,
    prompts: list[str],
    ground_truths: list[str],
    reward_fn: Any,
    generate: Any,
    optimizer: torch.optim.Optimizer,
    **settings: Any,
) -> None:
    """Train `policy` in place by the settings, which have the handout's names."""
    o = settings
    learner = _learner(policy, tokenizer, o)
    learner.optimizer = optimizer  # the check's own, which writes down its steps
    for step in range(o["n_grpo_steps"]):
        samples = _sampled(step, prompts, ground_truths, reward_fn, generate, tokenizer, o)
        if o["epochs_per_rollout_batch"] > 1:
            samples = [_with_old(sample) for sample in samples]
        size = o["train_batch_size"]
        for _ in range(o["epochs_per_rollout_batch"]):
            for first in range(0, len(samples), size):
                learner.update(samples[first : first + size])


def _learner(model: Any, tokenizer: Any, o: dict[str, Any]) -> Learner:
    loss = LossConfig(o["loss_type"], o["cliprange"])
    std_norm = "group_std" if o["use_std_normalization"] else "none"
    objective = Objective(loss, LengthNormConfig(), std_norm=std_norm, advantage_eps=o["advantage_eps"])
    numbers = OptimizationConfig(
        learning_rate=1.0,
        max_grad_norm=o["max_grad_norm"],
        train_batch_size=o["train_batch_size"],
        micro_batch_size=max(1, o["train_batch_size"] // o["gradient_accumulation_steps"]),
    )
    return Learner(Policy(model, tokenizer), objective, numbers, temperature=o["sampling_temperature"])


def _sampled(
    step: int, prompts: list[str], truths: list[str], reward_fn: Any, generate: Any, tokenizer: Any, o: dict[str, Any]
) -> list[Sample]:
    """The step's rollout batch with rewards and advantages; its questions are the next ones of the list."""
    count, size = o["rollout_batch_size"] // o["group_size"], o["group_size"]
    asked = [place % len(prompts) for place in range(step * count, (step + 1) * count)]
    texts = [prompts[place] for place in asked]
    drawn = generate(texts, n=size, temperature=o["sampling_temperature"], max_tokens=o["sampling_max_tokens"])
    places = [place for place in asked for _ in range(size)]
    rewards = [reward_fn(r.text, truths[place])["reward"] for r, place in zip(drawn, places, strict=True)]
    advantages = compute_group_advantages(
        torch.tensor(rewards),
        torch.tensor(places),
        std_norm="group_std" if o["use_std_normalization"] else "none",
        advantage_eps=o["advantage_eps"],
    )
    return [
        Sample(
            Response(str(place), r.prompt_ids, r.token_ids, r.log_probs, r.text, "length" if r.truncated else "stop"),
            Grade(1.0, reward, reward, "correct" if reward > 0 else "wrong"),
            advantage=advantage,
        )
        for r, place, reward, advantage in zip(drawn, places, rewards, advantages.tolist(), strict=True)
    ]


def _with_old(sample: Sample) -> Sample:
    """The sample with its log-probabilities under the policy that sampled, which `generate` gives."""
    return replace(sample, old_log_probs=sample.response.log_probs)
