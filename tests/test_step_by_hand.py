"""GRPO steps of a whole run, computed again from its saved responses in plain torch, written from the formulas.

It would catch what no test of a part can: a wrong row, mask, divisor, group, rate or order between the parts.
"""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlreason import train

CLIP, PEAK, WARMUP, STEPS, BETAS, EPS = 0.2, 3e-3, 2, 3, (0.9, 0.95), 1e-8


def step_by_hand(model, moments, rows, epochs: int, rates: list[float]) -> None:
    """Take the updates of one step: group-standardised advantages, clipped ratio, mean of means, clipped gradient."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["problem_id"], []).append(row["reward"])

    def advantage(row) -> float:
        group = rewards[row["problem_id"]]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        return (row["reward"] - mean) / (std + 1e-6)

    def log_probs(row) -> torch.Tensor:  # of the response tokens, one sequence at a time, no padding
        ids = torch.tensor([[*row["prompt_ids"], *row["token_ids"]]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]

    with torch.no_grad():
        old = [log_probs(row) for row in rows]
    for epoch in range(epochs):
        model.zero_grad()
        for row, before in zip(rows, old, strict=True):
            ratio = (log_probs(row) - before).exp()
            credit = advantage(row)
            surrogate = torch.minimum(ratio * credit, ratio.clamp(1 - CLIP, 1 + CLIP) * credit)
            (-surrogate.mean() / len(rows)).backward()
        weights = [p for p in model.parameters() if p.requires_grad]
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in weights))
        for p in weights:
            gradient = p.grad * min(1.0, 1.0 / (norm + 1e-6))
            state = moments.setdefault(id(p), [torch.zeros_like(p), torch.zeros_like(p), 0])
            state[0] = BETAS[0] * state[0] + (1 - BETAS[0]) * gradient
            state[1] = BETAS[1] * state[1] + (1 - BETAS[1]) * gradient**2
            state[2] += 1
            first, second = (m / (1 - beta ** state[2]) for m, beta in zip(state, BETAS, strict=False))
            with torch.no_grad():
                p -= rates[epoch] * first / (second.sqrt() + EPS)


def some_of_each(response: str, gold: str) -> float:
    """Differs between the responses of an untrained model."""
    return len(response) % 5 / 4


def rows_in(path: Path) -> list[dict[str, Any]]:
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("loss", "epochs"), [("reinforce_with_baseline", 1), ("grpo_clip", 3)])
def test_a_run_takes_the_steps_that_the_formulas_give(policy, tmp_path, monkeypatch, loss, epochs):
    monkeypatch.chdir(tmp_path)
    policy.save(tmp_path / "start")
    train(
        "model=local", "model.path=start", "data=stories", "prompt=r1_zero_short", "scale=embedded", f"loss={loss}",
        f"n_steps={STEPS}", "rollout_batch_size=32", "train_batch_size=32", "group_size=4", "threads=1",
        f"epochs_per_rollout={epochs}", f"learning_rate={PEAK}", "lr_schedule=linear", f"warmup_steps={WARMUP}",
        "data.n_train=64", "data.n_validation=8", "eval_problems=8", "eval_every=0", "save_rollouts_every=1",
        "sampling.min_tokens=0", "sampling.max_tokens=16", "micro_batch_tokens=600", "hydra.run.dir=run",
        reward=some_of_each, quiet=True,
    )  # fmt: skip
    updates = [row for row in rows_in(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    rates = [row["train/learning_rate"] for row in updates]
    expected = [PEAK * (k + 1) / (WARMUP * epochs) for k in range(WARMUP * epochs)]
    expected += [PEAK * (epochs - k) / epochs for k in range(epochs)]  # the last step: linearly to the end of the run
    assert rates == pytest.approx(expected)
    model, moments = AutoModelForCausalLM.from_pretrained(tmp_path / "start"), dict[int, list[Any]]()
    for step, file in enumerate(sorted((tmp_path / "run/rollouts").iterdir())):
        step_by_hand(model, moments, rows_in(file), epochs, rates[step * epochs : (step + 1) * epochs])
    assert step == STEPS - 1
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    before = policy.model.state_dict()
    for name, weight in model.state_dict().items():
        assert (trained[name] - weight).abs().max() < 0.005 * (trained[name] - before[name]).abs().max(), name
