"""The real vLLM in a process of its own, on the processor: weights travel as between two GPUs, by another wire."""

import os
import time

import pytest
import torch
from conftest import PROMPT
from recording import Recording
from test_unread_settings import VLLM_SETTINGS, compare, settings

from rlreason.engines.base import Demand, Prompt, Sampling, seed_for
from rlreason.engines.build import check_engine
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.transfer import HostTransfer, engine_processes
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def engine(tokenizer, tmp_path_factory):
    policy = Policy(build_model(len(tokenizer), width=128, init_scale=0.3, seed=1), tokenizer)
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    run = settings("rollout=vllm", "rollout.placement=second_gpu", "rollout.timeout_s=300")
    recording = Recording(run)
    made = VLLMEngine(policy, run.rollout, HostTransfer(), log, Demand(512, 32), lambda _: None)
    compare(run, recording.read, VLLM_SETTINGS)
    yield made
    made.close()


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two GPUs are here")
def test_without_two_gpus_the_placement_is_a_users_mistake():
    run = settings("rollout=vllm", "rollout.placement=second_gpu", "rollout.async_level=1", "loss=grpo_clip")
    with pytest.raises(ConfigError, match=r"rollout.placement=second_gpu: .*choose auto"):
        check_engine(run)


def prompts_for(policy, problems, count=4):
    texts = [(p.id, PROMPT.format(question=p.question)) for p in problems[:count]]
    return [Prompt(name, policy.encode_prompt(text), seed_for(0, name)) for name, text in texts]


def move(policy: Policy, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(factor * parameter.flip(0))


def test_tokens_and_log_probs_are_the_in_process_engines(engine, problems):
    assert len(engine_processes()) == 1
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # the next engine may be one inside this process
    prompts = prompts_for(engine.policy, problems)
    theirs, ours = (e.generate(prompts, Sampling(0.0, 0, 24), 1) for e in (engine, HFEngine(engine.policy)))
    assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]
    sampled = engine.generate(prompts, Sampling(1.3, 0, 24), 4)
    scores = LogProbScorer(engine.policy, 4096, 1.3).log_probs([(r.prompt_ids, r.token_ids) for r in sampled])
    pairs = zip(sampled, scores, strict=True)
    assert max(abs(a - b) for r, score in pairs for a, b in zip(r.log_probs, score, strict=True)) < 1e-3


def test_a_weight_sync_moves_the_engine_and_is_verified(engine, problems):
    prompts, sampling = prompts_for(engine.policy, problems), Sampling(0.0, 0, 16)
    before = engine.generate(prompts, sampling, 1)
    move(engine.policy, 0.5)
    metrics = engine.load_weights(engine.policy)
    after = engine.generate(prompts, sampling, 1)
    assert [r.token_ids for r in after] != [r.token_ids for r in before]
    assert [r.token_ids for r in after] == [r.token_ids for r in HFEngine(engine.policy).generate(prompts, sampling, 1)]
    assert after[0].weight_version == before[0].weight_version + 1
    assert metrics["rollout/weight_check_mismatch"] < 1e-3
    assert metrics["rollout/weight_check_tensors"] > 5


def test_stale_weights_and_a_stale_cache_are_seen(engine):
    norm = engine.policy.model.model.norm.weight
    with torch.no_grad():
        norm[0] = torch.nextafter(norm[0], torch.tensor(9.0))
    assert engine.verify_weights().differing == (
        "model.norm.weight",
    )  # one rounding of one number, which no probe could show
    move(engine.policy, 0.1)
    found = engine.verify_weights()
    assert found.mismatch > found.bound
    assert "model.embed_tokens.weight" in found.differing
    engine.transfer.send_weights(engine.llm, engine.policy)  # and the prefix cache is left as it was
    found = engine.verify_weights()
    assert not found.differing
    assert found.mismatch > found.bound
    engine.load_weights(engine.policy)
    assert engine.verify_weights().holds


def test_an_interrupted_call_leaves_nothing_behind_for_the_next(engine, problems):
    prompts, sampling = prompts_for(engine.policy, problems), Sampling(1.0, 0, 24)
    expected = [r.token_ids for r in engine.generate(prompts, sampling, 2)]

    def interrupt(place: int, response: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling, 2, interrupt)
    assert [r.token_ids for r in engine.generate(prompts, sampling, 2)] == expected


def test_a_killed_process_is_one_error_and_close_leaves_none(engine):
    process = psutil.Process(engine_processes()[0].pid)
    family = [process, *process.children(recursive=True)]
    prompt = [Prompt("p", [5, 6, 7], 0)]

    def kill(place: int, response: object) -> None:
        process.kill()

    began = time.monotonic()
    with pytest.raises(EngineError, match=r"exit code -9"):
        engine.generate([*prompt, Prompt("longer", [5, 6, 8], 0)], Sampling(1.0, 0, 400), 16, kill)
    with pytest.raises(EngineError, match="is dead since"):
        engine.generate(prompt, Sampling(1.0, 0, 4), 1)
    engine.close()
    assert time.monotonic() - began < 20
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert engine_processes() == []
