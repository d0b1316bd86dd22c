"""CS336 2025 (and PKU homework 3): the handout's functions against loops, with a real tokenizer and tiny
model.
"""

import math
import statistics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlreason.courses import cs336_2025 as course
from rlreason.courses import pku_hw3

WORDS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "what",
    "is",
    "two",
    "plus",
    "three",
    "?",
    "four",
    "five",
    "six",
    "so",
    ".",
]


def word_tokenizer(pad_token="<pad>", adds_bos=False):
    """One token per word; with `adds_bos` it puts a begin token before every text unless told not to."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        bos = ("<bos>", WORDS.index("<bos>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad_token, eos_token="<eos>")


def tiny_model(seed=0, dtype=torch.float32):
    """A random Qwen2 of two layers over the words above."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.1,  # large enough for two seeds to differ
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


PROMPTS = ["what is two plus three ?", "so ?", "what is six ?"]
OUTPUTS = ["five . <eos>", "so four plus two is six . <eos>", "."]


def expected_rows(prompts, outputs):
    """Token ids and output flags of every row, not yet padded or shifted."""
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [WORDS.index(word) for word in f"{prompt} {output}".split()]
        yield ids, [False] * len(prompt.split()) + [True] * len(output.split())


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>", None])
def test_tokenize_pads_right_shifts_once_and_masks_by_length(pad_token, adds_bos):
    batch = course.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer(pad_token, adds_bos))
    assert set(batch) == {"input_ids", "labels", "response_mask"}
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool
    rows = list(expected_rows(PROMPTS, OUTPUTS))
    width = max(len(ids) for ids, _ in rows)
    pad = WORDS.index(pad_token or "<eos>")
    for row, (ids, flags) in enumerate(rows):
        full = ids + [pad] * (width - len(ids))
        assert batch["input_ids"][row].tolist() == full[:-1]
        assert batch["labels"][row].tolist() == full[1:]
        assert batch["response_mask"][row].tolist() == (flags + [False] * (width - len(flags)))[1:]


def test_every_output_token_is_masked_in_even_where_the_end_token_is_also_the_pad():
    batch = course.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer("<eos>"))
    assert batch["response_mask"].sum(-1).tolist() == [len(output.split()) for output in OUTPUTS]
    assert batch["labels"][batch["response_mask"]].tolist().count(WORDS.index("<eos>")) == 2


def test_tokenize_refuses_lists_of_different_lengths():
    with pytest.raises(ValueError, match="3 prompts and 2 outputs"):
        course.tokenize_prompt_and_output(PROMPTS, OUTPUTS[:2], word_tokenizer())


def test_log_probs_and_entropy_of_a_model_equal_a_loop_without_padding():
    model = tiny_model()
    batch = course.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer())
    scored = course.get_response_log_probs(
        model, batch["input_ids"], batch["labels"], return_token_entropy=True
    )
    assert set(scored) == {"log_probs", "token_entropy"}
    assert set(course.get_response_log_probs(model, batch["input_ids"], batch["labels"], False)) == {
        "log_probs"
    }
    for row, (ids, _) in enumerate(expected_rows(PROMPTS, OUTPUTS)):
        logits = model(torch.tensor([ids])).logits[0].double()
        for t in range(len(ids) - 1):
            weights = [math.exp(x) for x in logits[t].tolist()]
            probs = [weight / sum(weights) for weight in weights]
            entropy = -sum(p * math.log(p) for p in probs)
            assert scored["log_probs"][row, t].item() == pytest.approx(math.log(probs[ids[t + 1]]), abs=1e-5)
            assert scored["token_entropy"][row, t].item() == pytest.approx(entropy, abs=1e-5)


def test_scores_are_float32_for_a_bfloat16_model_and_carry_a_gradient():
    model = tiny_model(dtype=torch.bfloat16)
    batch = course.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer())
    scored = course.get_response_log_probs(
        model, batch["input_ids"], batch["labels"], return_token_entropy=True
    )
    assert scored["log_probs"].dtype == scored["token_entropy"].dtype == torch.float32
    assert scored["log_probs"].requires_grad
    assert course.compute_entropy(torch.zeros(2, 3, 7)).shape == (2, 3)


def test_masked_mean_of_an_empty_slice_is_nan_in_the_course():
    values, mask = torch.ones(2, 3), torch.tensor([[True, False, False], [True, False, True]])
    assert course.masked_mean(tensor=values, mask=mask, dim=0).isnan().tolist() == [False, True, False]
    assert course.masked_mean(values, mask).item() == 1.0
    normalized = course.masked_normalize(tensor=values, mask=mask, normalize_constant=4.0, dim=1)
    assert normalized.tolist() == [0.25, 0.5]
    assert course.masked_normalize(values, mask, 4.0).item() == 0.75


@pytest.fixture
def micro_batch():
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    policy = policy.detach().requires_grad_()
    old = policy.detach() + 0.4 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).bool()
    rewards = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    advantages = torch.tensor([[0.7], [-1.3], [0.2]], dtype=torch.float64)
    return {"policy": policy, "old": old, "mask": mask, "rewards": rewards, "advantages": advantages}


@pytest.mark.parametrize("constant", [1.0, 10.0])
def test_sft_step_goes_backward_in_place(micro_batch, constant):
    policy, mask = micro_batch["policy"], micro_batch["mask"]
    for times in (1, 2, 3):  # gradients are never cleared: they accumulate
        loss, metadata = course.sft_microbatch_train_step(
            policy_log_probs=policy,
            response_mask=mask,
            gradient_accumulation_steps=2,
            normalize_constant=constant,
        )
        expected = -sum(policy[mask].tolist()) / constant / 3 / 2
        assert loss.item() == pytest.approx(expected)
        torch.testing.assert_close(policy.grad, -mask.double() * times / (3 * 2 * constant))
    assert loss.shape == ()
    assert isinstance(metadata, dict)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_group_normalized_rewards_take_consecutive_groups_and_the_unbiased_std(normalize_by_std):
    values = [0.2, 0.9, 0.4, 0.1, 0.1, 0.7]
    advantages, raw, metadata = course.compute_group_normalized_rewards(
        reward_fn=lambda response, truth: {
            "reward": values[int(response)] * float(truth),
            "format_reward": 1.0,
        },
        rollout_responses=[str(i) for i in range(6)],
        repeated_ground_truths=["1"] * 6,
        group_size=3,
        advantage_eps=0.01,
        normalize_by_std=normalize_by_std,
    )
    assert raw.tolist() == pytest.approx(values)
    expected = []
    for start in (0, 3):
        group = values[start : start + 3]
        divisor = statistics.stdev(group) + 0.01 if normalize_by_std else 1.0
        expected += [(value - statistics.fmean(group)) / divisor for value in group]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert metadata["mean_reward"] == pytest.approx(statistics.fmean(values))
    assert metadata["mean_format_reward"] == 1.0


def test_incomplete_groups_and_unpaired_truths_are_refused():
    arguments = {"advantage_eps": 1e-6, "normalize_by_std": True}

    def reward_fn(response, truth):
        return {"reward": 1.0}

    with pytest.raises(ValueError, match="group_size=2"):
        course.compute_group_normalized_rewards(reward_fn, ["a"] * 3, ["b"] * 3, 2, **arguments)
    with pytest.raises(ValueError, match="3 responses and 2 ground truths"):
        course.compute_group_normalized_rewards(reward_fn, ["a"] * 3, ["b"] * 2, 1, **arguments)


def token_loss(loss_type, reward, advantage, policy, old, cliprange):
    ratio = math.exp(policy - old)
    return {
        "no_baseline": -reward * policy,
        "reinforce_with_baseline": -advantage * policy,
        "grpo_no_clip": -advantage * ratio,
        "grpo_clip": -min(ratio * advantage, min(max(ratio, 1 - cliprange), 1 + cliprange) * advantage),
    }[loss_type]


LOSS_TYPES = ["no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_gradient_losses_equal_a_loop_at_every_position(micro_batch, loss_type):
    m = micro_batch
    loss, metadata = course.compute_policy_gradient_loss(
        policy_log_probs=m["policy"],
        loss_type=loss_type,
        raw_rewards=m["rewards"],
        advantages=m["advantages"],
        old_log_probs=m["old"],
        cliprange=0.2,
    )
    assert isinstance(metadata, dict)
    for row in range(3):
        reward, advantage = m["rewards"][row].item(), m["advantages"][row].item()
        for t in range(6):
            policy, old = m["policy"][row, t].item(), m["old"][row, t].item()
            expected = token_loss(loss_type, reward, advantage, policy, old, 0.2)
            assert loss[row, t].item() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_micro_batch_step_averages_per_row_and_accumulates(micro_batch, loss_type):
    m = micro_batch
    policy, mask = m["policy"], m["mask"]
    arguments = {
        "response_mask": mask,
        "gradient_accumulation_steps": 4,
        "loss_type": loss_type,
        "raw_rewards": m["rewards"],
        "advantages": m["advantages"],
        "old_log_probs": m["old"],
        "cliprange": 0.2,
    }
    loss, metadata = course.grpo_microbatch_train_step(policy_log_probs=policy, **arguments)
    first = policy.grad.clone()
    rows = []
    for row in range(3):
        pair = m["rewards"][row].item(), m["advantages"][row].item()
        tokens = [t for t in range(6) if mask[row, t]]
        losses = [
            token_loss(loss_type, *pair, policy[row, t].item(), m["old"][row, t].item(), 0.2) for t in tokens
        ]
        rows.append(statistics.fmean(losses))
    assert loss.item() == pytest.approx(statistics.fmean(rows) / 4)
    assert not first[~mask].any()
    course.grpo_microbatch_train_step(policy_log_probs=policy, **arguments)
    torch.testing.assert_close(policy.grad, 2 * first)
    assert all(value.shape == () for value in metadata.values())


def test_clip_metadata_and_naive_loss(micro_batch):
    m = micro_batch
    loss, metadata = course.compute_grpo_clip_loss(m["advantages"], m["policy"], m["old"], 0.2)
    ratio = (m["policy"] - m["old"]).exp().detach()
    gone = ((m["advantages"] > 0) & (ratio > 1.2)) | ((m["advantages"] < 0) & (ratio < 0.8))
    assert torch.equal(metadata["clipped"], gone.double())
    assert 0 < gone.sum() < gone.numel()
    assert loss.shape == (3, 6)
    naive = course.compute_naive_policy_gradient_loss(
        raw_rewards_or_advantages=m["advantages"], policy_log_probs=m["policy"]
    )
    torch.testing.assert_close(naive, -m["advantages"] * m["policy"])


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_no_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
    ],
)
def test_a_missing_argument_is_named(micro_batch, loss_type, missing):
    m = micro_batch
    given = {
        "raw_rewards": m["rewards"],
        "advantages": m["advantages"],
        "old_log_probs": m["old"],
        "cliprange": 0.2,
    }
    with pytest.raises(ValueError, match=f"{missing}=None"):
        course.compute_policy_gradient_loss(m["policy"], loss_type, **{**given, missing: None})
    with pytest.raises(ValueError, match="choose one of"):
        course.compute_policy_gradient_loss(m["policy"], "ppo", **given)


def test_pku_homework_has_the_same_functions():
    assert pku_hw3.__all__ == course.__all__
    assert all(getattr(pku_hw3, name) is getattr(course, name) for name in course.__all__)
