"""The handouts' functions: tokenizing, scores, vLLM, what the train step of 2026 reports, and what is refused.

`test_check.py` holds the functions of both years, and that step, to plain implementations on all cases of the check.
"""

import json
import math
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlreason.courses import cs336_2025, cs336_2026, pku_hw3
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

WORDS = [
    "<pad>", "<eos>", "<bos>", "what", "is", "two", "plus", "three", "?", "four", "five", "six", "so", ".",
]  # fmt: skip


def word_tokenizer(pad_token="<pad>", adds_bos=False):
    """One token per word; with `adds_bos` it puts a begin token before every text unless told not to."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        bos = ("<bos>", WORDS.index("<bos>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad_token, eos_token="<eos>")


def tiny_model(seed=0, dtype=torch.float32):
    """A random Llama of two layers over the words above."""
    return build_model(len(WORDS), width=16, layers=2, heads=2, init_scale=0.1, seed=seed).to(dtype).eval()


PROMPTS = ["what is two plus three ?", "so ?", "what is six ?"]
OUTPUTS = ["five . <eos>", "so four plus two is six . <eos>", "."]


def expected_rows(prompts, outputs):
    """Token ids and output flags of every row, not yet padded or shifted."""
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [WORDS.index(word) for word in f"{prompt} {output}".split()]
        yield ids, [False] * len(prompt.split()) + [True] * len(output.split())


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>", None])
def test_tokenize_pads_right_shifts_once_and_masks_by_length(pad_token):
    """Padding without a pad token, an end token that is masked as padding, a shift too many."""
    batch = cs336_2025.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer(pad_token, adds_bos=True))
    assert [value.dtype for value in batch.values()] == [torch.int64, torch.int64, torch.bool]
    rows = list(expected_rows(PROMPTS, OUTPUTS))
    width = max(len(ids) for ids, _ in rows)
    pad = WORDS.index(pad_token or "<eos>")
    for row, (ids, flags) in enumerate(rows):
        full = ids + [pad] * (width - len(ids))
        assert batch["input_ids"][row].tolist() == full[:-1]
        assert batch["labels"][row].tolist() == full[1:]
        assert batch["response_mask"][row].tolist() == (flags + [False] * (width - len(flags)))[1:]


def test_log_probs_and_entropy_of_a_model_in_half_precision_are_float32():
    batch = cs336_2025.tokenize_prompt_and_output(PROMPTS, OUTPUTS, word_tokenizer())
    model, given = tiny_model(dtype=torch.bfloat16), (batch["input_ids"], batch["labels"])
    half = cs336_2025.get_response_log_probs(model, *given, return_token_entropy=True)
    assert half["log_probs"].dtype == half["token_entropy"].dtype == torch.float32
    assert half["log_probs"].requires_grad


def contains_truth(response, truth):
    correct = float(truth in response.split())
    return {"reward": correct, "format_reward": 1.0, "answer_reward": correct}


def test_generations_are_logged_with_their_entropy_and_lengths():
    """A prompt's tokens or padding in a response's entropy or length, or right and wrong lengths exchanged."""
    model, truths = tiny_model(), ["five", "two", "six"]
    rows, metadata = cs336_2025.log_generations(model, word_tokenizer(), contains_truth, PROMPTS, OUTPUTS, truths)
    assert [row["length"] for row in rows] == [len(output.split()) for output in OUTPUTS]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0]
    assert (metadata["mean_length_correct"], metadata["mean_length_incorrect"]) == (5.5, 1.0)
    assert metadata["mean_format_reward"] == 1.0
    for row, (ids, flags) in zip(rows, expected_rows(PROMPTS, OUTPUTS), strict=True):
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        of_response = [entropies[place - 1].item() for place in range(1, len(ids)) if flags[place]]
        assert row["token_entropy"] == pytest.approx(statistics.fmean(of_response), rel=1e-5)


def test_an_evaluation_is_on_disk_with_every_row(tmp_path):
    """A row lost, or graded by another row's ground truth."""
    replies = dict(zip(PROMPTS, OUTPUTS, strict=True))

    class Model:
        def generate(self, prompts, params):
            return [SimpleNamespace(outputs=[SimpleNamespace(text=replies[prompt])]) for prompt in prompts]

    truths, path = ["five", "three", "."], tmp_path / "rows.jsonl"
    means = cs336_2025.evaluate_vllm(Model(), contains_truth, PROMPTS, None, truths, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["prompt"], row["response"], row["ground_truth"]) for row in rows]
    assert found == list(zip(PROMPTS, OUTPUTS, truths, strict=True))
    assert [row["answer_reward"] for row in rows] == [1.0, 0.0, 1.0]
    assert means["mean_reward"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="zip"):
        cs336_2025.evaluate_vllm(Model(), contains_truth, PROMPTS, None, truths[:2], path)


ONES, MASK = torch.ones(2, 3), torch.ones(2, 3).bool()


def loss_2025(kind, **missing):
    given = {"raw_rewards": ONES[:, :1], "advantages": ONES[:, :1], "old_log_probs": ONES, "cliprange": 0.2}
    return cs336_2025.compute_policy_gradient_loss(ONES, kind, **given | missing)


def loss_2026(kind, **missing):
    given = {"old_log_probs": ONES, "cliprange": 0.2, "response_mask": MASK}
    return cs336_2026.compute_policy_gradient_loss(ONES[:, 0], ONES, kind, **given | missing)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: loss_2025("no_baseline", raw_rewards=None), "raw_rewards=None"),
        (lambda: loss_2025("grpo_clip", cliprange=None), "cliprange=None"),
        (lambda: loss_2026("gspo", response_mask=None), "response_mask=None: 'gspo'"),
        (lambda: loss_2025("ppo"), "choose one of"),
        (lambda: loss_2026("ppo"), "choose one of"),
        (lambda: cs336_2026.aggregate_loss_across_microbatch(ONES, MASK, "constant"), "constant=None"),
        (lambda: cs336_2026.aggregate_loss_across_microbatch(ONES, MASK, "token"), "choose one of"),
        (lambda: cs336_2026.compute_group_normalized_rewards(torch.ones(3), 2), "group_size=2"),
        (lambda: cs336_2026.compute_rollout_rewards(contains_truth, ["a"] * 3, ["b"] * 2), "zip"),
        (lambda: cs336_2025.tokenize_prompt_and_output(PROMPTS, OUTPUTS[:2], word_tokenizer()), "zip"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_unclipped_loss_of_2025_and_the_metadata_of_both_years():
    old, advantages = ONES - torch.tensor([[0.5, -0.5, 0.0]]), torch.tensor([[2.0], [-1.0]])
    given = {"advantages": advantages, "old_log_probs": old}
    loss, _ = cs336_2025.compute_policy_gradient_loss(ONES, "grpo_no_clip", **given)
    torch.testing.assert_close(loss, -advantages * (ONES - old).exp())
    _, clipped = cs336_2025.compute_grpo_clip_loss(advantages, ONES, old, 0.2)
    assert clipped["clipped"].tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    rewards, means = cs336_2026.compute_rollout_rewards(contains_truth, ["a b", "c"], ["a", "a"])
    assert (rewards.tolist(), means["mean_reward"], means["mean_format_reward"]) == ([1.0, 0.0], 0.5, 1.0)
    mask = torch.tensor([[True, False, False], [True, False, True]])  # a mean over nothing is NaN in the course
    assert cs336_2025.masked_mean(tensor=ONES, mask=mask, dim=0).isnan().tolist() == [False, True, False]
    assert pku_hw3.__all__ == cs336_2025.__all__
    assert all(getattr(pku_hw3, name) is getattr(cs336_2025, name) for name in pku_hw3.__all__)


def test_train_step_clips_the_whole_gradient_before_the_step_leaves_none_behind_and_reports():
    """A clip of parts or after the step, gradients for the next step, averages over padding or some micro-batches."""
    asked = ["what is two plus three ?"] * 2 + ["so is four plus two six ?"] * 2 + ["what ?"] * 2
    answered = ["five .", "so four plus two is six . <eos>", ". <eos>", "so", "two two", "six five four ."]
    truths = ["five", "five", "so", "so", "none", "none"]  # the last group has no variance
    batch = cs336_2026.tokenize_prompt_and_output(asked, answered, word_tokenizer())
    with torch.no_grad():
        old = cs336_2026.get_response_log_probs(tiny_model(seed=1), batch["input_ids"], batch["labels"])["log_probs"]
    clipped = {"importance_reweighting_method": "grpo", "cliprange": 0.1, "old_log_probs": old}

    def step(accumulation, max_grad_norm, responses, **options):
        """One step with plain SGD; returns how far the weights moved, the loss and the metadata."""
        model = tiny_model()
        loss, metadata = cs336_2026.grpo_train_step(
            model, word_tokenizer(), torch.optim.SGD(model.parameters(), lr=0.5), accumulation, max_grad_norm,
            contains_truth, asked, responses, truths, group_size=2, **options,
        )  # fmt: skip
        assert all(parameter.grad is None for parameter in model.parameters())
        squares = zip(model.parameters(), tiny_model().parameters(), strict=True)
        return math.sqrt(sum((after - before).square().sum().item() for after, before in squares)), loss, metadata

    moved, loss, metadata = step(3, 0.01, answered, **clipped)
    assert moved == pytest.approx(0.5 * 0.01, rel=1e-2)
    assert metadata["grad_norm"] > 0.01  # reported as it was before the clip
    expected = {"loss": loss.item(), "mean_reward": 2 / 6, "nonzero_advantage_share": 4 / 6}
    assert {key: metadata[key] for key in expected} == pytest.approx(expected)
    for key, (low, high) in {"token_entropy": (0, math.log(14)), "clipped": (0, 1), "ratio": (0.5, 2)}.items():
        assert low < metadata[key] < high + 1e-6
    moved, loss, metadata = step(2, None, ["."] * 6)  # nothing to learn
    assert (loss.item(), metadata["grad_norm"], moved) == (0.0, 0.0, 0.0)


def test_an_instance_is_made_and_loaded_as_vllm_is_called(monkeypatch):
    """Another GPU than the one named, a student's argument without effect, old keys in the prefix cache."""
    made, loaded = [], []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda *given, **named: made.append((given, named))))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    cs336_2025.init_vllm("MODEL", "cuda:1", 7, dtype="float32")
    cs336_2025.init_vllm("MODEL", "cpu", 7, gpu_memory_utilization=0.3)
    own = {"enable_prefix_caching": True, "seed": 7}
    assert made == [
        (("MODEL",), {**own, "dtype": "float32", "gpu_memory_utilization": 0.85, "device_ids": [1]}),
        (("MODEL",), {**own, "dtype": "bfloat16", "gpu_memory_utilization": 0.3}),
    ]
    llm = SimpleNamespace(
        collective_rpc=lambda name, kwargs: loaded.append((name, dict(kwargs["weights_iterator"]))),
        apply_model=lambda function: loaded.append(function.__name__),
        reset_prefix_cache=lambda: loaded.append("reset"),
    )
    model = tiny_model()
    cs336_2025.load_policy_into_vllm_instance(model, llm)
    (name, weights), *rest = loaded
    assert (name, weights.keys(), rest) == ("reload_weights", model.state_dict().keys(), ["repack_tied_head", "reset"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_instance_samples_from_the_policy_that_was_loaded_last(tokenizer, tmp_path):
    """Weights that do not arrive, a tied head that stays as it was, or a prefix cache with the old weights' keys."""
    vllm = pytest.importorskip("vllm")
    first, second = (build_model(len(tokenizer), width=128, init_scale=0.3, seed=seed).eval() for seed in (1, 2))
    Policy(first, tokenizer).save(tmp_path / "model")
    llm = cs336_2025.init_vllm(
        str(tmp_path / "model"), "cpu", seed=0, block_size=32, generation_config="vllm", max_num_seqs=4,
        dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**26,
    )  # fmt: skip
    prompt = tokenizer.encode("What is 17 + 25? " * 5, add_special_tokens=False)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def sampled() -> list[int]:
        return list(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids)

    def greedy(model: torch.nn.Module) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    assert sampled() == greedy(first)
    for policy in (second, first):
        cs336_2025.load_policy_into_vllm_instance(policy, llm)
        assert sampled() == greedy(policy)
    assert greedy(first) != greedy(second)
