"""Model folders as people have them: what is in the files is what is trained, or the folder is refused in one line."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlreason.doctor.look_at_run import weight_findings
from rlreason.doctor.probing import Found
from rlreason.errors import ConfigError
from rlreason.model.loading import load_model, look_into
from rlreason.model.policy import load_policy


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


def same(weights):
    return weights


def prefixed(prefix: str):
    return reweighed(lambda weights: {prefix + name: w for name, w in weights.items()})


def quantised(**how):
    return reweighed(same, quantization_config=how)


def adapter(folder: Path) -> None:
    edited(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="some/base", r=2)


LACKING = "model.layers.1.mlp.down_proj.weight"
FAULTS = {
    "compiled": (prefixed("_orig_mod."), "_orig_mod."),
    "data parallel": (prefixed("module."), "module."),
    "a tensor is missing": (reweighed(lambda w: {k: v for k, v in w.items() if k != LACKING}), re.escape(LACKING)),
    "one is not the model's": (reweighed(lambda w: w | {"v_head.weight": w[LACKING]}), "v_head.weight"),
    "no head": (reweighed(same, tie_word_embeddings=False), r"lm_head\.weight.*tie_word_embeddings=false"),
    "more layers": (reweighed(same, num_hidden_layers=3, layer_types=None), "3 layers, the files 2"),
    "fewer layers": (reweighed(same, num_hidden_layers=1, layer_types=None), "1 layers, the files 2"),
    "another shape": (reweighed(same, intermediate_size=64), r"\[32, 96\], expected \[32, 64\]"),
    "bitsandbytes": (quantised(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    "gptq": (quantised(quant_method="gptq", bits=4), "gptq"),
    "fp8": (quantised(quant_method="fp8", weight_block_size=[128, 128]), "fp8"),
    "an adapter": (adapter, "adapter_config.json.*some/base"),
    "an activation that is none": (reweighed(same, hidden_act="nosuch"), "nosuch"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_were_not_loaded_are_refused_by_a_run_and_by_the_doctor(saved, fault):
    change, named = FAULTS[fault]
    change(saved)
    with pytest.raises(ConfigError, match=named) as of_run:
        load_policy(str(saved))
    with pytest.raises(ConfigError) as of_doctor:
        look_into(str(saved))
    assert str(of_doctor.value) == str(of_run.value)
    assert "\n" not in str(of_run.value)
    [finding] = weight_findings(Found({"refused": str(of_doctor.value)}))
    assert finding.state == "fail"
    assert finding.cure


@pytest.mark.parametrize(
    "change",
    [
        same,
        lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]},
        lambda w: {("lm_head.weight" if "embed" in name else name): value for name, value in w.items()},
        lambda w: {name.removeprefix("model."): value for name, value in w.items()},
        lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": w["model.norm.weight"]},
    ],
    ids=["as saved", "head and embeddings", "head alone", "of the base model", "old buffers"],
)
def test_names_that_transformers_knows_are_no_fault(saved, policy, change):
    reweighed(change)(saved)
    loaded = dict(load_policy(str(saved)).named_weights())
    assert all(w.equal(loaded[name]) for name, w in policy.named_weights())
    assert "21 weights" in look_into(str(saved))


def test_a_head_that_is_not_the_embeddings_stays_one_whatever_the_config_says(saved):
    reweighed(lambda w: w | {"lm_head.weight": 2 * w["model.embed_tokens.weight"]})(saved)
    model = load_model(str(saved))
    assert model.lm_head.weight.equal(2 * model.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is False
