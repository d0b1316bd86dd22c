"""vLLM inside a trainer that is one of several ranks: it leaves their process group alone from start to end."""

import os
import re
import subprocess
import sys

import pytest

from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

pytest.importorskip("vllm")

SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Prompt, Sampling
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.transfer import InProcessTransfer
from rlreason.model.policy import load_policy

def total() -> float:
    share = torch.tensor([float(rank + 1)])
    dist.all_reduce(share)
    return share.item()

def tokens(engine):
    return engine.generate([Prompt("p", [5, 6, 7], rank)], Sampling(max_tokens=8), 2)[0].token_ids

folder, names = Path(sys.argv[1]), ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
dist.init_process_group("gloo")
rank, world, told = dist.get_rank(), dist.get_world_size(), [os.environ[name] for name in names]
expected = world * (world + 1) / 2
assert total() == expected
rollout = RolloutConfig("vllm", timeout_s=300, kv_cache_gb=0.1)
policy = load_policy(str(folder / "model"), "float32")
seen = []
for start in range(2):  # the second after the first has ended
    engine = VLLMEngine(policy, rollout, InProcessTransfer(), folder / f"{rank}.log", Demand(256, 4), lambda _: None)
    assert total() == expected
    seen.append(tokens(engine))
    engine.close()
    assert dist.is_initialized() and total() == expected
assert seen[0] == seen[1]
assert [os.environ[name] for name in names] == told
print(f"rank {rank} of {world} sampled {seen[0]} and sums still", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_closing_an_engine_leaves_the_trainers_process_group(tokenizer, tmp_path, ranks):
    """Each rank has an engine of its own inside, and they sum after each has been closed."""
    Policy(build_model(len(tokenizer), width=64, heads=2), tokenizer).save(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*started, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sums still") == ranks
    sampled = set(re.findall(r"sampled (\[[^]]*\]) and", done.stdout))  # ranks may write into each other's lines
    assert len(sampled) == ranks, done.stdout  # each its own
