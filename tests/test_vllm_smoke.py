"""The real vLLM on the processor, in one engine's start: it samples, takes new weights, and holds the trainer's."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_engine import prompts_for
from test_memory_options import gaps_of, model_of

from rlreason.engines.base import Demand, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_process import Place
from rlreason.engines.vllm_server import WeightCheck
from rlreason.model.policy import Policy, load_policy
from tests.run_settings import settings

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),  # slow to import
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def shipped_model(path: Path, tokenizer, tied: bool) -> Path:
    """Write a model as its makers may ship it: with sampling settings of their own, which must not reach the engine."""
    Policy(model_of(tokenizer, tied, 128), tokenizer).save(path)
    shipped = {"do_sample": True, "top_k": 20, "top_p": 0.5, "repetition_penalty": 1.5, "temperature": 0.6}
    (path / "generation_config.json").write_text(json.dumps(shipped | {"eos_token_id": tokenizer.eos_token_id}))
    return path


def move(policy: Policy, seed: int, scale: float = 0.05) -> None:
    """Change all weights a little, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.abs().mean())


def check(engine: VLLMEngine) -> WeightCheck:
    """Check the weights of the only engine."""
    (found,) = engine.check_weights().values()
    return found


@pytest.fixture(scope="module")
def engine(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    policy = load_policy(str(shipped_model(folder / "model", tokenizer, tied=True)))
    run = settings("rollout=vllm", "rollout.placement=cpu")
    made = VLLMEngine(policy, run.rollout, [Place("the processor")], folder, Demand(512, 32))
    yield made
    made.close()


def test_it_samples_with_the_trainers_log_probs(engine, problems):
    """Bug: a wrong temperature, or top-k or a penalty of the model's folder; each would put them off by tenths."""
    prompts = prompts_for(engine.policy, problems)
    responses = engine.generate(prompts, Sampling(1.3, max_tokens=24), 4)
    assert len(responses) == 4 * len(prompts)
    assert len({tuple(r.token_ids) for r in responses}) == len(responses)  # a shared seed would repeat samples
    assert max(gaps_of(responses, engine.policy, 1.3)) < 1e-3


def test_new_weights_reach_it(engine, problems):
    """Bug: a layer, a packed copy or a prefix cache keeps the old weights."""
    prompts, sampling = prompts_for(engine.policy, problems, 2), Sampling(0.0, 0, 16)
    before = engine.generate(prompts, sampling, 1)
    move(engine.policy, seed=2, scale=0.5)
    metrics = engine.load_weights(engine.policy)
    after = engine.generate(prompts, sampling, 1)
    assert [r.token_ids for r in before] != [r.token_ids for r in after]
    assert [r.token_ids for r in after] == [r.token_ids for r in HFEngine(engine.policy).generate(prompts, sampling, 1)]
    assert after[0].weight_version == before[0].weight_version + 1
    assert metrics["rollout/weight_check_mismatch"] < 1e-3


def test_weights_that_were_not_sent_are_seen(engine):
    """Bug: the check passes whatever the engine holds."""
    assert check(engine).holds
    move(engine.policy, seed=3)
    found = check(engine)
    assert found.mismatch > 10 * found.bound
    assert "model.embed_tokens.weight" in found.differing
    engine.load_weights(engine.policy)
    assert check(engine).holds
