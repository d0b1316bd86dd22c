"""CS336 2026: the handout's functions against loops, and its train step on a tiny model."""

import math
import statistics

import pytest
import torch
from test_courses_scoring import tiny_model, word_tokenizer

from rlreason.courses import cs336_2026 as course

PROMPTS = ["what is two plus three ?"] * 2 + ["so is four plus two six ?"] * 2 + ["what ?"] * 2
RESPONSES = ["five .", "so four plus two is six . <eos>", ". <eos>", "so", "two two", "six five four ."]
TRUTHS = ["five", "five", "so", "so", "none", "none"]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]  # the last group has no variance


def contains_truth(response, truth):
    correct = float(truth in response.split())
    return {"reward": correct, "format_reward": 1.0, "answer_reward": correct}


def test_rollout_rewards_and_their_means():
    rewards, metadata = course.compute_rollout_rewards(contains_truth, RESPONSES, TRUTHS)
    assert rewards.tolist() == REWARDS
    assert metadata["mean_reward"] == pytest.approx(2 / 6)
    assert metadata["mean_format_reward"] == 1.0


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("normalizer", ["std", "none", "mean"])
@pytest.mark.parametrize("baseline", ["mean", "none"])
def test_group_normalized_rewards(baseline, normalizer, shape):
    values = [0.2, 0.9, 0.4, 0.1, 0.1, 0.7]
    advantages, metadata = course.compute_group_normalized_rewards(
        torch.tensor(values), 3, baseline=baseline, advantage_eps=0.02, advantage_normalizer=normalizer
    )
    expected = []
    for start in (0, 3):
        group = values[start : start + 3]
        mean = statistics.fmean(group)
        divisor = {"std": statistics.stdev(group) + 0.02, "none": 1.0, "mean": mean + 0.02}[normalizer]
        expected += [(value - (mean if baseline == "mean" else 0.0)) / divisor for value in group]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert isinstance(metadata, dict)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(3, 6, generator=generator, dtype=torch.float64)
    old = policy + 0.4 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).bool()
    return torch.tensor([0.7, -1.3, 0.2], dtype=torch.float64), policy.requires_grad_(), old, mask


def reference_ratio(method, policy, old, mask):
    """The ratio at every position of one row."""
    gaps = [a - b for a, b in zip(policy, old, strict=True)]
    if method == "gspo":
        mean = statistics.fmean(gap for gap, m in zip(gaps, mask, strict=True) if m)
        return [math.exp(mean)] * len(gaps)
    return [math.exp(gap) for gap in gaps]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("method", ["none", "noclip", "grpo", "gspo"])
def test_policy_gradient_loss_equals_a_loop_at_every_position(method, shape):
    for seed in range(20):
        advantages, policy, old, mask = tensors(seed)
        loss, metadata = course.compute_policy_gradient_loss(
            advantages.reshape(shape), policy, method, old_log_probs=old, cliprange=0.1, response_mask=mask
        )
        assert loss.shape == (3, 6)
        assert isinstance(metadata, dict)
        for row in range(3):
            advantage, log_probs = advantages[row].item(), policy[row].tolist()
            ratios = reference_ratio(method, log_probs, old[row].tolist(), mask[row].tolist())
            for t, ratio in enumerate(ratios):
                expected = {
                    "none": -advantage * log_probs[t],
                    "noclip": -advantage * ratio,
                }.get(method, -min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage))
                assert loss[row, t].item() == pytest.approx(expected)


def test_gspo_ratio_keeps_its_gradient():
    advantages, policy, old, mask = tensors()
    loss, _ = course.compute_policy_gradient_loss(
        advantages, policy, "gspo", old_log_probs=old, cliprange=0.9, response_mask=mask
    )
    course.aggregate_loss_across_microbatch(loss, mask).backward()
    assert policy.grad[mask].abs().min() > 0
    assert not policy.grad[~mask].any()


@pytest.mark.parametrize(
    ("method", "missing"),
    [("noclip", "old_log_probs"), ("grpo", "cliprange"), ("gspo", "response_mask"), ("gspo", "cliprange")],
)
def test_a_missing_argument_is_named(method, missing):
    advantages, policy, old, mask = tensors()
    given = {"old_log_probs": old, "cliprange": 0.2, "response_mask": mask, missing: None}
    with pytest.raises(ValueError, match=f"{missing}=None: '{method}'"):
        course.compute_policy_gradient_loss(advantages, policy, method, **given)
    with pytest.raises(ValueError, match="choose one of"):
        course.compute_policy_gradient_loss(advantages, policy, "ppo", **given)


def test_aggregation_by_sequence_and_by_constant():
    _, values, _, mask = tensors()
    means = [statistics.fmean(values[row][mask[row]].tolist()) for row in range(3)]
    by_sequence = course.aggregate_loss_across_microbatch(values, mask, loss_normalization="sequence")
    assert by_sequence.item() == pytest.approx(statistics.fmean(means))
    by_constant = course.aggregate_loss_across_microbatch(
        values, mask, loss_normalization="constant", normalization_constant=50
    )
    assert by_constant.item() == pytest.approx(sum(values[mask].tolist()) / 50)  # not divided by rows
    with pytest.raises(ValueError, match="normalization_constant=None"):
        course.aggregate_loss_across_microbatch(values, mask, loss_normalization="constant")
    with pytest.raises(ValueError, match="choose one of"):
        course.aggregate_loss_across_microbatch(values, mask, loss_normalization="token")


OPTIONS = {
    "standard": {},
    "dr_grpo": {
        "advantage_normalizer": "none",
        "loss_normalization": "constant",
        "normalization_constant": 60,
    },
    "rft": {"baseline": "none", "advantage_normalizer": "none"},
    "maxrl": {"advantage_normalizer": "mean", "advantage_eps": 0.1},
    "noclip": {"importance_reweighting_method": "noclip"},
    "grpo": {"importance_reweighting_method": "grpo", "cliprange": 0.1},
    "gspo": {"importance_reweighting_method": "gspo", "cliprange": 0.02},
}


def old_log_probs():
    """Log-probs of a slightly different model, as wide as the whole batch."""
    batch = course.tokenize_prompt_and_output(PROMPTS, RESPONSES, word_tokenizer())
    with torch.no_grad():
        return course.get_response_log_probs(tiny_model(seed=1), batch["input_ids"], batch["labels"])["log_probs"]


def train_step(name, accumulation, max_grad_norm=None, responses=RESPONSES):
    """One step with plain SGD; returns the model, the loss and the metadata."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = dict(OPTIONS[name])
    if "importance_reweighting_method" in options:
        options["old_log_probs"] = old_log_probs()
    loss, metadata = course.grpo_train_step(
        model=model,
        tokenizer=word_tokenizer(),
        optimizer=optimizer,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=max_grad_norm,
        reward_fn=contains_truth,
        repeated_prompts=PROMPTS,
        rollout_responses=responses,
        repeated_ground_truths=TRUTHS,
        group_size=2,
        **options,
    )
    return model, loss, metadata


def reference_step(name):
    """The same loss and gradient from the whole batch at once, no row skipped, written out."""
    options = {"baseline": "mean", "advantage_normalizer": "std", "advantage_eps": 1e-6, **OPTIONS[name]}
    model, method = tiny_model(), options.get("importance_reweighting_method", "none")
    batch = course.tokenize_prompt_and_output(PROMPTS, RESPONSES, word_tokenizer())
    logits = model(batch["input_ids"]).logits
    log_probs = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    groups = torch.tensor(REWARDS).reshape(3, 2)
    mean = groups.mean(-1, keepdim=True)
    divisor = {"std": groups.std(-1, keepdim=True), "mean": mean, "none": None}[options["advantage_normalizer"]]
    advantages = groups - mean if options["baseline"] == "mean" else groups
    advantages = advantages if divisor is None else advantages / (divisor + options["advantage_eps"])
    advantages, mask = advantages.reshape(6, 1), batch["response_mask"]
    if method == "none":
        loss = -advantages * log_probs
    else:
        gap = log_probs - old_log_probs()
        if method == "gspo":
            gap = ((gap * mask).sum(-1) / mask.sum(-1))[:, None].expand_as(gap)
        clip = options.get("cliprange", 1e9)
        loss = -torch.minimum(gap.exp() * advantages, gap.exp().clamp(1 - clip, 1 + clip) * advantages)
    rows = (loss * mask).sum(-1)
    if options.get("loss_normalization") == "constant":
        total = rows.sum() / options["normalization_constant"]
    else:
        total = (rows / mask.sum(-1)).mean()
    total.backward()
    return model, total.detach()


@pytest.mark.parametrize("accumulation", [1, 2, 4, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_train_step_equals_the_whole_batch_at_once_for_any_accumulation(name, accumulation):
    expected_model, expected_loss = reference_step(name)
    model, loss, metadata = train_step(name, accumulation)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in expected_model.parameters()))
    assert metadata["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 0.01
    for after, before in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(after, before - 0.5 * before.grad, rtol=1e-4, atol=1e-6)


def test_train_step_clips_the_whole_gradient_before_the_step_and_leaves_none_behind():
    start = tiny_model()
    model, _, metadata = train_step("standard", accumulation=3, max_grad_norm=0.01)
    assert all(parameter.grad is None for parameter in model.parameters())
    squares = zip(model.parameters(), start.parameters(), strict=True)
    moved = math.sqrt(sum((after - before).square().sum().item() for after, before in squares))
    assert moved == pytest.approx(0.5 * 0.01, rel=1e-2)
    assert metadata["grad_norm"] > 0.01  # reported as it was before the clip


def test_train_step_reports_what_the_handout_asks_for():
    _, loss, metadata = train_step("grpo", accumulation=2)
    assert metadata["loss"] == pytest.approx(loss.item())
    assert metadata["mean_reward"] == pytest.approx(2 / 6)
    assert metadata["nonzero_advantage_share"] == pytest.approx(4 / 6)
    assert 0 < metadata["token_entropy"] <= math.log(14) + 1e-6
    assert 0 < metadata["clipped"] < 1
    assert 0.5 < metadata["ratio"] < 2


def test_train_step_without_any_learning_signal_changes_nothing():
    start = tiny_model()
    model, loss, metadata = train_step("standard", accumulation=2, responses=["."] * 6)
    assert loss.item() == 0.0
    assert metadata["grad_norm"] == 0.0
    for after, before in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(after, before)
