"""Model folders as people have them: what is in the files is what is trained, or the folder is refused in one line."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import PROMPT
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from rlreason.config.store import typed
from rlreason.engines.base import Prompt, Sampling, Stops
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import write_model
from rlreason.errors import ConfigError
from rlreason.model.packing import pack
from rlreason.model.parameters import END, PAD, TAGS, build_model, load_model, load_tokenizer
from rlreason.model.policy import Policy, load_policy
from rlreason.training.build import make_sampling


@pytest.fixture
def saved(policy, tmp_path) -> Path:
    """A sound folder of two layers with tied embeddings."""
    policy.save(tmp_path / "model")
    return tmp_path / "model"


def edited(path: Path, **changed) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changed))


def reweighed(change, **config):
    """A change of a folder: the weights as a whole, and fields of its config."""

    def apply(folder: Path) -> None:
        weights = change(load_file(folder / "model.safetensors"))
        save_file({name: w.clone() for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        edited(folder / "config.json", **config)

    return apply


LACKING = "model.layers.1.mlp.down_proj.weight"
FAULTS = {
    "a tensor is missing": (reweighed(lambda w: {k: v for k, v in w.items() if k != LACKING}), re.escape(LACKING)),
    "one is not the model's": (reweighed(lambda w: w | {"v_head.weight": w[LACKING]}), "v_head.weight"),
    "more layers": (reweighed(dict, num_hidden_layers=3, layer_types=None), "layers.2"),
    "quantised": (reweighed(dict, quantization_config={"quant_method": "bitsandbytes"}), "quantization_config"),
    "an adapter": (lambda folder: edited(folder / "adapter_config.json", peft_type="LORA"), "adapter_config.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_were_not_loaded_are_refused(saved, fault):
    change, named = FAULTS[fault]
    change(saved)
    with pytest.raises(ConfigError, match=named):
        load_policy(str(saved))


def test_names_that_transformers_knows_are_no_fault_and_a_head_of_its_own_stays_one(saved, policy):
    for change in (
        lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]},
        lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": w["model.norm.weight"]},  # old buffers
        lambda w: {name.removeprefix("model."): value for name, value in w.items()},
    ):
        reweighed(change)(saved)
        loaded = dict(load_policy(str(saved)).named_weights())
        assert all(w.equal(loaded[name]) for name, w in policy.named_weights())
    policy.save(saved.parent / "again")
    reweighed(lambda w: w | {"lm_head.weight": 2 * policy.head})(saved.parent / "again")
    assert load_model(str(saved.parent / "again")).lm_head.weight.equal(2 * policy.head)


def test_an_end_that_a_tokenizer_appends_does_not_end_a_prompt_and_what_it_puts_in_front_stays(saved, policy):
    tokenizer = load_tokenizer(str(saved))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{PAD} $A {END}", special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in (PAD, END)]
    )
    tokenizer.save_pretrained(saved)
    changed = load_policy(str(saved))
    for text in ("How many?", f"so {END}", ""):
        bare = policy.tokenizer.encode(text, add_special_tokens=False)
        assert changed.encode_prompt(text) == [policy.tokenizer.pad_token_id, *bare]


def test_special_tokens_that_prompt_reward_or_stop_read_stay_in_the_text(tokenizer, composed, tmp_path):
    tagged = copy.deepcopy(tokenizer)
    tagged.add_tokens([*TAGS, "<final>", "</final>", "<|im_end|>"], special_tokens=True)
    policy = Policy(build_model(len(tagged), width=16, layers=1), tagged)
    (tmp_path / "own.prompt").write_bytes(b"\xef\xbb\xbfAnswer {question} in <final>.<|im_end|>")  # a byte order mark
    words = f"prompt.file={tmp_path}/own.prompt", "prompt.stop=['</final>','<|im_end|>']"
    sampling = make_sampling(typed(composed("algorithm=evaluate", *words)).asking, policy)
    assert set(sampling.tags) == {*TAGS, "<final>", "</final>"}
    written = "2 </think> <answer>4</answer> <final>4</final>"
    ids = tagged.encode(f"{written}<|im_end|>", add_special_tokens=False)
    assert Stops(tagged, sampling).text(ids, 0) == written
    assert Stops(tagged, Sampling(stop=sampling.stop)).text(ids, 0).replace(" ", "") == "244"


def test_a_token_that_the_model_has_no_row_for_is_refused_in_a_text(saved, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_special_tokens({"pad_token": "[PAD]"})
    larger.save_pretrained(saved)
    policy = load_policy(str(saved))
    with pytest.raises(ConfigError, match=r"\[PAD\]"):
        policy.encode_prompt("How [PAD] many?")


def test_rows_that_no_token_has_are_never_sampled_or_sent_and_change_no_probability(policy, problems, tmp_path):
    model, rows = copy.deepcopy(policy.model), len(policy.head)
    model.resize_token_embeddings(rows + 40, mean_resizing=False)
    with torch.no_grad():  # more likely than any token
        model.get_input_embeddings().weight[rows:] = 8 * policy.head[20]
    padded = Policy(model, policy.tokenizer)
    prompts = [Prompt(p.id, policy.encode_prompt(PROMPT.format(question=p.question)), 7) for p in problems[:16]]
    plain, cut = (HFEngine(p).generate(prompts, Sampling(1.0, 0, 12), n=2) for p in (policy, padded))
    assert [r.token_ids for r in plain] == [r.token_ids for r in cut]
    batch = pack([(r.prompt_ids, r.token_ids) for r in plain])
    for ours, theirs in zip(policy.log_probs(batch, 0.7), padded.log_probs(batch, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        (ours.sum() + theirs.sum()).backward(retain_graph=True)
    torch.testing.assert_close(policy.head.grad, padded.head.grad[:rows], rtol=1e-3, atol=1e-4)
    assert not padded.head.grad[rows:].any()
    sent = dict(padded.engine_weights())
    assert all(w.equal(sent[name]) for name, w in policy.engine_weights())
    assert json.loads((Path(write_model(padded, tmp_path)) / "config.json").read_text())["vocab_size"] == rows


def test_generation_settings_that_transformers_refuses_keep_no_model_from_being_saved(saved, tmp_path):
    edited(saved / "generation_config.json", eos_token_id=[0, 5], do_sample=False, temperature=0.6)
    load_policy(str(saved)).save(tmp_path / "again")
    assert load_policy(str(tmp_path / "again")).end_ids == {0, 5}
