"""Two real vLLM processes as one engine, on the processor: dealt prompts, weights for both, and failures by name."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
from conftest import PROMPT

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Prompt, Sampling, seed_for
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.many import ManyEngines
from rlreason.engines.vllm.start import environment
from rlreason.engines.vllm.transfer import HostTransfer, engine_processes
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]
NAMES = ("GPU 1", "GPU 2")  # where they would run
#: As torchrun tells the second of two ranks. No process listens at that port.
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


class LosesWeights(HostTransfer):
    """A way on which weights get lost, once it is told to lose them."""

    loses = False

    def send_weights(self, llm, policy) -> None:
        if not self.loses:
            super().send_weights(llm, policy)


@dataclass
class Started:
    """Two engines as one, and what was seen of their start."""

    many: ManyEngines
    said: list[str]
    variables: list[dict[str, str]]  # of each engine's process


@pytest.fixture(scope="module")
def started(tokenizer, tmp_path_factory):
    policy = Policy(build_model(len(tokenizer), width=128, init_scale=0.3, seed=1), tokenizer)
    folder, said = tmp_path_factory.mktemp("logs"), list[str]()
    rollout = RolloutConfig("vllm", placement="second_gpu", gpus=2, timeout_s=300, kv_cache_gb=0.1)
    with environment(TORCHRUN):
        engines = [
            VLLMEngine(policy, rollout, way, folder / f"{k}.log", Demand(256, 16), said.append, started=False)
            for k, way in enumerate((HostTransfer(), LosesWeights()))
        ]
        many = ManyEngines(engines, NAMES)
        assert {name: os.environ[name] for name in TORCHRUN} == TORCHRUN  # the trainer's own are back
    yield Started(many, said, [psutil.Process(p.pid).environ() for p in engine_processes()])
    many.close()
    assert engine_processes() == []


def prompts_for(policy, problems, count):
    texts = [(p.id, PROMPT.format(question=p.question)) for p in problems[:count]]
    return [Prompt(name, policy.encode_prompt(text), seed_for(0, name)) for name, text in texts]


def tokens(responses):
    return [(r.problem_id, r.token_ids) for r in responses]


def test_each_engine_knows_its_own_process_and_nothing_of_the_trainers_ranks(started):
    own = [[process.pid for process in engine.transfer.processes] for engine in started.many.engines]
    assert [len(pids) for pids in own] == [1, 1]
    assert sorted(pid for pids in own for pid in pids) == sorted(process.pid for process in engine_processes())
    assert len(started.variables) == 2
    # vLLM sets some of them anew.
    assert [name for variables in started.variables for name in TORCHRUN if variables.get(name) == TORCHRUN[name]] == []
    assert sum("vLLM is ready" in line for line in started.said) == 2


@pytest.mark.parametrize("count", [6, 5, 1])
def test_two_engines_draw_the_tokens_of_one(started, problems, count):
    """Evenly dealt, unevenly, and with one engine that gets none."""
    many, places = started.many, list[int]()
    prompts, sampling = prompts_for(many.engines[0].policy, problems, count), Sampling(1.0, 0, 24)
    two = many.generate(prompts, sampling, 3, lambda place, response: places.append(place))
    drawn = many.drawn
    assert tokens(two) == tokens(many.engines[0].generate(prompts, sampling, 3))
    assert [r.problem_id for r in two] == [p.problem_id for p in prompts for _ in range(3)]
    assert sorted(places) == list(range(3 * count))
    assert drawn >= sum(len(r.token_ids) for r in two)  # from both, and nothing of an earlier call
    assert drawn < 4 * sum(len(r.token_ids) for r in two)


def test_new_weights_reach_both_and_are_checked_in_both(started, problems):
    many, policy = started.many, started.many.engines[0].policy
    prompts, sampling = prompts_for(policy, problems, 4), Sampling(0.0, 0, 16)
    before = many.generate(prompts, sampling, 1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * parameter.flip(0))
    alone = many.engines[0].load_weights(policy)
    many.engines[0].weight_version -= 1
    metrics = many.load_weights(policy)
    after = many.generate(prompts, sampling, 1)
    assert tokens(after) != tokens(before)
    assert tokens(after) == tokens(HFEngine(policy).generate(prompts, sampling, 1))
    assert {r.weight_version for r in after} == {before[0].weight_version + 1} == {many.weight_version}
    assert metrics["rollout/weight_check_mismatch"] < 1e-3
    assert metrics["rollout/weight_check_tensors"] == 2 * alone["rollout/weight_check_tensors"]
    many.weight_version = 7  # as a run that goes on sets it
    assert {r.weight_version for r in many.generate(prompts, sampling, 1)} == {7}


def test_an_engine_that_lost_its_weights_is_named(started):
    many, policy = started.many, started.many.engines[0].policy
    many.engines[1].transfer.loses = True
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.01)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2: "):
        many.load_weights(policy)
    many.engines[1].transfer.loses = False
    many.load_weights(policy)


def test_a_call_that_ends_early_leaves_nothing_behind_for_the_next(started, problems):
    many = started.many
    prompts, sampling = prompts_for(many.engines[0].policy, problems, 4), Sampling(1.0, 0, 24)
    expected = tokens(many.generate(prompts, sampling, 2))

    def interrupt(place: int, response: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        many.generate(prompts, sampling, 2, interrupt)
    with pytest.raises(ConfigError, match=r"the prompt of long .* do not fit"):  # a user's mistake stays one
        many.generate([*prompts, Prompt("long", [5] * 250, 0)], sampling, 2)
    assert tokens(many.generate(prompts, sampling, 2)) == expected


def test_engines_that_sleep_are_filled_anew_before_they_sample(started, problems):
    """The processor's vLLM gives no memory back, so the order of the calls to its process is what is tested."""
    many = started.many
    prompts, sampling = prompts_for(many.engines[0].policy, problems, 3), Sampling(1.0, 0, 16)
    awake = tokens(many.generate(prompts, sampling, 2))
    for engine in many.engines:
        engine.sleeps = True
    many.generate(prompts[:1], sampling, 2)
    assert [engine.asleep for engine in many.engines] == [True, False]  # one without prompts is left alone
    assert tokens(many.generate(prompts, sampling, 2)) == awake
    assert all(engine.asleep for engine in many.engines)
    for engine in many.engines:
        engine.sleeps = False
    many.load_weights(many.engines[0].policy)
    assert not any(engine.asleep for engine in many.engines)


def test_one_that_is_closed_ends_no_other_and_one_that_is_killed_ends_the_call(started, problems):
    many = started.many
    prompts, sampling = prompts_for(many.engines[0].policy, problems, 4), Sampling(1.0, 0, 200)
    first, second = (psutil.Process(engine.transfer.processes[0].pid) for engine in many.engines)

    def kill(place: int, response: object) -> None:
        if second.is_running():
            second.kill()

    began = time.monotonic()
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2: .*exit code -9"):
        many.generate(prompts, sampling, 8, kill)
    assert time.monotonic() - began < 20
    assert first.is_running()
    many.engines[1].close()
    assert first.is_running()
    alone = many.engines[0].generate(prompts, Sampling(1.0, 0, 8), 2)
    assert len(alone) == 8
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2: "):
        many.load_weights(many.engines[0].policy)
    family = [first, *first.children(recursive=True)]
    many.close()
    assert psutil.wait_procs(family, timeout=600)[1] == []
