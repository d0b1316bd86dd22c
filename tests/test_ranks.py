"""Training on several ranks, here processes that meet by gloo: the numbers of one process, also killed and stopped."""

import copy
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers as hf
from conftest import random_pairs
from torch.distributed import HashStore

from rlreason import load_run
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import choose_dtype, materialize, skeleton_of
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.records.reader import read_status
from rlreason.runtime import signals
from rlreason.runtime.machine import Device, Place, place_of, world_of
from rlreason.training import distributed
from rlreason.training.build import frozen_copy, learner_settings, make_policy, set_trained
from rlreason.training.distributed import Ranks, make_ranked_learner
from rlreason.training.learner import Learner
from rlreason.types import Grade, Response, Sample
from tests.run_settings import settings
from tests.starts import ENV, ROOT, Started, rlreason
from tests.test_trainer import SMALL, run_of, trained
from tests.waiting import wait_for

SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
RIGHT = Grade(1.0, 1.0, 1.0, "correct")
#: Seven micro-batches that need a gradient and one that needs none: no number of ranks divides them evenly.
WORDS = (
    "gpus=2", "micro_batch_tokens=48", "train_batch_size=16", "max_grad_norm=1000", "learning_rate=0.01",
    "waits.run_s=120",
)  # fmt: skip


def samples_for(policy: Policy) -> list[Sample]:
    """Ragged ones: some of advantage 0, some without loss, and some that carry neither."""
    pairs = random_pairs(len(policy.tokenizer), 24, seed=3)
    advantages = [0.0 if i % 5 == 0 else (-1.0) ** i * (0.3 + i / 24) for i in range(24)]
    responses = [Response(f"p{i // 4}", p, r, [-1.0] * len(r), "", "stop") for i, (p, r) in enumerate(pairs)]
    zipped = enumerate(zip(responses, advantages, strict=True))
    return [Sample(one, RIGHT, advantage=a, has_loss=i % 7 != 0) for i, (one, a) in zipped]


def grouped_policy(tokenizer, tied: bool, products: torch.dtype, head: str, spread: bool) -> Policy:
    """Keys with fewer heads than queries, and two layers."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "initializer_range": 0.1}
    config = hf.Qwen2Config(**sizes, tie_word_embeddings=tied, bos_token_id=None)
    heads = torch.bfloat16 if head == "bfloat16" else torch.float32
    return Policy(hf.Qwen2ForCausalLM(config), tokenizer, products, head_dtype=heads, in_main_memory=spread)


KL, CHECKPOINTING = ("kl_placement=loss", "kl_coef=0.1"), "model.gradient_checkpointing=true"
HALF = ("model.dtype=bfloat16", "model.head=bfloat16")


CASES = {  # name -> whether the head is tied, overrides
    "replicate": (True, ("parallel=replicate", *KL, "entropy_coef=0.01")),
    "shard, checkpointing": (True, ("parallel=shard", CHECKPOINTING)),
    "replicate, checkpointing, LoRA": (True, ("parallel=replicate", CHECKPOINTING, "model.lora.rank=4")),
    "shard, half precision": (False, ("parallel=shard", *HALF, CHECKPOINTING)),
    "replicate, four ranks": (True, ("parallel=replicate", "gpus=4")),
    "shard, untied, LoRA": (False, ("parallel=shard", "model.lora.rank=4", *KL)),
}
QUICK = ("replicate",)  # a whole run below is sharded


@pytest.fixture
def forked_ranks(monkeypatch) -> list[Started]:
    """The ranks that are started from now on, each a fork of the server that has its libraries."""
    started: list[Started] = []

    def fork(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append(Started(cwd=ROOT, **env))
        process = started[-1].process
        return SimpleNamespace(poll=lambda: process.exitcode, wait=process.join, kill=process.kill)

    instead = SimpleNamespace(Popen=fork, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("rlreason.training.distributed.subprocess", instead)
    return started


def said_by(ranks: list[Started]) -> list[str]:
    """Return the lines that forked ranks have printed."""
    ended = [rank.finished() for rank in ranks]
    lines = [line for rank in ended for line in (rank.stdout + rank.stderr).splitlines()]
    return [line for line in lines if "gemm_4bit" not in line]  # which bitsandbytes lacks where peft imports it


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CASES])
def test_ranks_follow_the_gradient_of_one_process_in_update_after_update(tokenizer, tmp_path, forked_ranks, case):
    tied, words = CASES[case]
    run, _ = run_of(*WORDS, *words)
    products = choose_dtype(run.model.dtype, Device("cpu"))
    policy = grouped_policy(tokenizer, tied, products, run.model.head, spread="parallel=shard" in words)
    set_trained(run.model, policy, run.seed)
    alone = Learner(policy.copy(), **learner_settings(run))
    reference = LogProbScorer(frozen_copy(policy), 96) if run.kl_placement != "none" else None
    samples = samples_for(policy)
    pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
    if reference:
        scores = reference.log_probs(pairs)
        samples = [replace(s, reference_log_probs=found) for s, found in zip(samples, scores, strict=True)]
    with_gradient = [needs for needs, _ in alone.step_micro_batches(samples)].count(True)
    assert with_gradient % int(run.gpus)  # some ranks have one more than others
    ranked = make_ranked_learner(run, policy, reference, int(run.gpus), tmp_path)
    try:
        if reference:  # which the ranks score together from now on
            assert_close(reference.log_probs(pairs), scores)
        for number in range(3):
            expected, found = alone.update(samples), ranked.update(samples)
            assert found.keys() == expected.keys()
            for name in expected:
                assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (number, name)
            if number == 0:  # the first moment of Adam is a tenth of the first gradient
                gradients, ours = ([10 * state["exp_avg"] for state in by.moments()] for by in (alone, ranked))
                assert max(g.abs().max() for g in gradients) > 1e-3
                torch.testing.assert_close(ours, gradients, atol=1e-6, rtol=0)
            weights = dict(alone.policy.named_weights())
            for name, weight in policy.named_weights():  # of the whole copy, where the model is in parts
                differ = (weight - weights[name]).abs()  # Adam takes a gradient of rounding alone for a whole one
                assert differ.mean() < 1e-5, (number, name)  # a wrong gradient moves them by the rate, 0.01
                assert differ.max() < 1e-3, (number, name)
        assert_close(LogProbScorer(policy, 96).log_probs(pairs), LogProbScorer(alone.policy, 96).log_probs(pairs), 1e-3)
        assert (ranked.weights_are_finite(), ranked.broken_moments()) == (True, set())
    finally:
        ranked.ranks.close()
    assert not said_by(forked_ranks)


def assert_close(found, expected, most: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=most)


def test_a_process_knows_its_place():
    """Bug: a rank trains on another's GPU, or a run on another number of ranks than was asked for."""
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert place_of(env) == Place(3, 4, 3)
    assert place_of(env | {"WORLD_SIZE": "1", "RANK": "0"}) is None  # torchrun with one process
    with pytest.raises(ConfigError, match="gpus=3, and torchrun"):
        world_of("3", Place(0, 2, 0), 2)
    with pytest.raises(ConfigError, match="gpus=4, and 2 GPUs"):
        world_of("4", None, 2)
    for words in ("gpus=0", "gpus=many", "parallel=shard with optimizer=adamw_8bit"):
        with pytest.raises(ConfigError, match=words):
            run_of(*words.split(" with "))


def test_a_rank_that_is_lost_is_named_and_ends_what_waits_for_it(tmp_path, monkeypatch):
    """Bug: a run hangs, or ends without a word, after another rank has been killed or has failed."""
    ranks, left = Ranks(HashStore(), 0, 3, limit_s=1.0), []
    ranks.folder, ranks._orders, ranks.children = tmp_path, None, {1: SimpleNamespace(poll=lambda: None)}
    monkeypatch.setattr(ranks, "broadcast", lambda *_: None)
    with pytest.raises(RuntimeError, match="own mistake"), ranks.together("update"):
        raise RuntimeError("own mistake")
    with pytest.raises(EngineError, match="is over"), ranks.together("update"):
        pass
    for said, lost in (("Connection closed by peer", "one has gone"), ("", "rank 1 ended with signal 9")):
        ranks.broken = False
        ranks.children[1].poll = lambda said=said: None if said else -9
        with pytest.raises(EngineError, match=f"ended in update: {lost}"), ranks.together("update"):
            raise RuntimeError(said)
    ranks.store.set("error2", "out of memory")
    monkeypatch.setattr(distributed, "GRACE_S", 0.01)
    monkeypatch.setattr(signals, "leave_at_once", lambda *why: (left.append(why), ranks._over.set()))
    assert ranks._over.is_set()
    ranks._over.clear()
    late = threading.Timer(30, ranks._over.set)  # ends a watch that sees nothing
    late.start()
    ranks._watch()
    late.cancel()
    ((text, code),) = left
    assert ("rank 1 ended with signal 9, rank 2 failed: out of memory" in text, code) == (True, 1)
    assert read_status(tmp_path) == "failed"


PAIRS = [([3, 5, 7], [11, 13, 2]), ([4], [9, 9, 9])]


def test_a_skeleton_takes_no_memory_until_it_gets_some_part_by_part():
    """Bug: a model that is to be spread lies whole in memory first."""
    bones = skeleton_of(hf.Olmo2Config(**SIZES))
    assert all(tensor.is_meta for tensor in [*bones.parameters(), *bones.buffers()])
    materialize(bones.model.layers[0], torch.device("cpu"))
    for name, tensor in bones.named_parameters():
        assert tensor.is_meta != name.startswith("model.layers.0.")


def test_in_main_memory_nothing_is_brought_to_the_device(tokenizer, monkeypatch, tmp_path):
    """Which is one without memory: whatever is mixed with the model ends in an error."""
    model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES))
    model.resize_token_embeddings(len(tokenizer))
    expected = LogProbScorer(Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16), 64).log_probs(PAIRS)
    here = Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16, in_main_memory=True)
    assert LogProbScorer(here, 64).log_probs(PAIRS) == expected
    here.save(tmp_path / "model")
    monkeypatch.setattr(Policy, "_check_first_layer", lambda self: None)  # on such a device nothing can be compared
    policy = Policy(model, tokenizer, head_dtype=torch.bfloat16, device=torch.device("meta"), in_main_memory=True)
    assert LogProbScorer(policy, 64).log_probs(PAIRS) == expected
    assert policy.copy().weights_device == torch.device("cpu")
    monkeypatch.undo()
    words = ("model=local", f"model.path={tmp_path / 'model'}", "rollout=hf", "gpus=2")
    for parallel in ("shard", "replicate"):
        assert make_policy(settings(*words, f"parallel={parallel}"), []).in_main_memory == (parallel == "shard")


ANY = (
    "n_steps=3", "eval_every=2", "eval_problems=8", "micro_batch_tokens=100", "prompt.reward=own_reward:halves",
    "sampling.max_tokens=24", "waits.run_s=120", "checkpoint.keep_final=true",
)  # fmt: skip
OF_RUN = (*ANY, "rollout_batch_size=16", "group_size=4")
TIMES = ("time/", "perf/", "busy/", "grading/ms", "memory/", "final/seconds")
COMMAND = [sys.executable, "-m", "rlreason"]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m", "rlreason"]


def whole_steps(rows: list[dict]) -> list[dict]:
    """The rows of optimizer steps: a run that was given more steps has evaluations that one at once has not."""
    return [{k: v for k, v in row.items() if k.startswith("train/")} for row in rows if "train/loss" in row]


def assert_same(rows: list[dict], expected: list[dict]) -> None:
    """The same numbers in each row, but for times."""
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() ^ other.keys() <= {"time/checkpoint"}  # due by the clock
        for name, value in other.items():
            if isinstance(value, float) and not name.startswith(TIMES):
                looked_at = 0.02 if name == "train/weights_changed" else 1e-4  # a few elements: others, in parts
                assert row[name] == pytest.approx(value, rel=1e-4, abs=looked_at), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    rows, _ = trained(tmp_path_factory.mktemp("alone"), *OF_RUN)
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows)
    return rows


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("gpus=2", "parallel=shard"), ()),
        pytest.param(("gpus=2", "parallel=replicate"), ("gpus=3", "parallel=shard"), marks=pytest.mark.long),
    ],
)
def test_a_run_has_the_numbers_of_one_process_and_goes_on_with_any_number_in_any_mode(
    tmp_path, alone, forked_ranks, first, then
):
    trained(tmp_path, *OF_RUN, "n_steps=2", *first)
    assert (len(forked_ranks), said_by(forked_ranks)) == (1, [])
    assert_same(whole_steps(trained(tmp_path, *OF_RUN, *then)[0]), whole_steps(alone))


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize(
    "more",
    [
        (*OF_RUN, "loss=grpo_clip", "epochs_per_rollout=2", "kl_placement=loss", "kl_coef=0.05"),
        (*ANY, "algorithm=ei", "restart=true", "question_batch_size=8", "group_size=4", "train_batch_size=8"),
        (*ANY, "algorithm=sft", "eval_every=0", "train_batch_size=8", "model.freeze=[model.layers.0.*]"),
    ],
)
def test_every_algorithm_has_the_numbers_of_one_process(tmp_path, more, parallel):
    expected, _ = trained(tmp_path / "one", *more, "n_steps=2")
    rows, _ = trained(tmp_path / "two", *more, "n_steps=2", "gpus=2", f"parallel={parallel}")
    assert_same(rows, expected)


ENVIRONMENT = os.environ | ENV | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


class Killed:
    """A command on two ranks, from its first updates on."""

    def __init__(self, folder: Path, start: list[str], *more: str) -> None:
        words = [*SMALL, *OF_RUN, "n_steps=500", "eval_every=0", "waits.run_s=3000", f"hydra.run.dir={folder}", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*start, *words], env=ENVIRONMENT, cwd=folder.parent, **pipes)
        rows = folder / "metrics.jsonl"
        wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 3)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = {process.environ().get("RANK"): process.pid for process in reversed(self.family)}

    def end(self) -> tuple[int, str]:
        """(exit code, what was printed); nothing may be left of it after ten seconds."""
        out, _ = self.process.communicate(timeout=600)
        assert psutil.wait_procs(self.family, timeout=10)[1] == []
        return self.process.returncode, out


LOSS = """
import os
def loss(advantages, policy_log_probs):
    begun = policy_log_probs.numel() >= 20
    if begun and os.environ.get("RANK", "0") in os.environ["FAILS_ON"]:
        raise ValueError("no such loss here")
    return -advantages * policy_log_probs
"""


@pytest.mark.long
@pytest.mark.parametrize(("fails_on", "parallel"), [("0", "shard"), ("1", "shard"), ("0,1", "replicate")])
def test_an_error_of_one_rank_alone_ends_the_run_soon(tmp_path, fails_on, parallel):
    """The other ranks wait in a sum; nobody may wait for them to hear anything."""
    (tmp_path / "fails.py").write_text(LOSS)
    words = [*SMALL, *OF_RUN, "loss=fails:loss", "gpus=2", f"parallel={parallel}", "hydra.run.dir=run"]
    words += ["waits.run_s=3000"]  # which would end it too, and later
    done = rlreason(*words, cwd=tmp_path, FAILS_ON=fails_on, PYTHONPATH=f"{ENVIRONMENT['PYTHONPATH']}:{tmp_path}")
    assert done.returncode == 1, done.stdout
    assert "no such loss here" in done.stderr
    assert load_run(tmp_path / "run").status == "failed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "victim", "number", "says"),
    [
        (COMMAND, "1", signal.SIGKILL, "rank 1 ended with signal 9"), (COMMAND, "1", signal.SIGSTOP, "waits.run_s=10"),
        (COMMAND, "0", signal.SIGKILL, ""), (TORCHRUN, "1", signal.SIGKILL, ""),
        (TORCHRUN, "the launcher", signal.SIGKILL, ""),
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_run_that_loses_a_part_or_waits_for_one(tmp_path, start, victim, number, says):
    gpus = ["gpus=2"] if start is COMMAND else []
    run = Killed(tmp_path / "run", start, *gpus, *["waits.run_s=10"] * (number == signal.SIGSTOP))
    parts = run.ranks | {"0": run.process.pid, "the launcher": run.process.pid}  # torchrun's rank 0 is no victim
    os.kill(parts[victim], number)
    code, out = run.end()
    assert (code != 0, says in out) == (True, True)
    assert not says or load_run(tmp_path / "run").status == "failed"


@pytest.mark.long
def test_a_signal_ends_ranks_in_order_and_the_run_goes_on(tmp_path):
    run = Killed(tmp_path / "run", COMMAND, "gpus=2", "parallel=shard")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    done = rlreason(f"resume={tmp_path / 'run'}", "n_steps=8", "gpus=1", "parallel=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_torchrun_trains_on_the_processor_and_a_command_that_trains_nothing_ends(tmp_path, alone):
    def done(*words: str) -> int:
        return subprocess.run([*TORCHRUN, *words], env=ENVIRONMENT, timeout=600, cwd=tmp_path, check=False).returncode

    assert done(*SMALL, *OF_RUN, "hydra.run.dir=run") == 0
    assert_same(whole_steps(load_run(tmp_path / "run").metrics), whole_steps(alone))
    assert [done("--version"), done("n_steps=x"), done("-m", "seed=0,1")] == [0, 1, 1]
