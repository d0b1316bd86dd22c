"""What both CS336 years share: tokenizing, log-probs and entropy, with a real tokenizer and a tiny model."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlreason.courses import cs336_2025 as course

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
    scored = course.get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    assert set(scored) == {"log_probs", "token_entropy"}
    assert set(course.get_response_log_probs(model, batch["input_ids"], batch["labels"], False)) == {"log_probs"}
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
    scored = course.get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    assert scored["log_probs"].dtype == scored["token_entropy"].dtype == torch.float32
    assert scored["log_probs"].requires_grad
    assert course.compute_entropy(torch.zeros(2, 3, 7)).shape == (2, 3)


def words_reward(response: str, ground_truth: str) -> dict[str, float]:
    right = float(ground_truth in response.split())
    return {"reward": right, "format_reward": 1.0, "answer_reward": right}


def test_generations_are_logged_with_their_entropy_and_lengths():
    """A prompt's tokens or padding in a response's entropy or length, or right and wrong lengths exchanged."""
    model, tokenizer = tiny_model(), word_tokenizer()
    rows, metadata = course.log_generations(model, tokenizer, words_reward, PROMPTS, OUTPUTS, ["five", "two", "six"])
    assert [row["length"] for row in rows] == [len(output.split()) for output in OUTPUTS]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0]
    assert (metadata["mean_length_correct"], metadata["mean_length_incorrect"]) == (5.5, 1.0)
    assert metadata["mean_format_reward"] == 1.0
    for row, (ids, flags) in zip(rows, expected_rows(PROMPTS, OUTPUTS), strict=True):
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        of_response = [entropies[place - 1].item() for place in range(1, len(ids)) if flags[place]]
        assert row["token_entropy"] == pytest.approx(sum(of_response) / len(of_response), rel=1e-5)


def test_an_evaluation_is_on_disk_with_every_row(tmp_path):
    """A row lost, or graded by another row's ground truth."""
    replies = dict(zip(PROMPTS, OUTPUTS, strict=True))

    class Model:
        def generate(self, prompts, params):
            return [SimpleNamespace(outputs=[SimpleNamespace(text=replies[prompt])]) for prompt in prompts]

    truths = ["five", "three", "."]
    means = course.evaluate_vllm(Model(), words_reward, PROMPTS, None, truths, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["response"], row["ground_truth"]) for row in rows] == list(
        zip(PROMPTS, OUTPUTS, truths, strict=True)
    )
    assert [row["answer_reward"] for row in rows] == [1.0, 0.0, 1.0]
    assert means["mean_reward"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="zip"):
        course.evaluate_vllm(Model(), words_reward, PROMPTS, None, truths[:2], tmp_path / "rows.jsonl")
