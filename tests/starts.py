"""The command line in processes of its own, without the seconds that each would spend on importing torch.

A server process imports the libraries once per test process and forks for every command: Python's own `forkserver`.
A command started so shares no memory, stream, signal handler or Hydra state with the tests. What it does share with the
other commands are the imported modules and the seed of Python's hashes; a test of either starts `python -m rlreason`.
"""

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlreason.cli.subcommands import named_subcommand, run_subcommand
from rlreason.records.console import exit_code_of
from tests.killed import AT, SIGNAL, follow

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "model.width=32", "model.warm_start.steps=4", "n_steps=2", "rollout_batch_size=16", "group_size=4",
    "eval_problems=8", "eval_every=1", "sampling.max_tokens=16", "data.n_train=256", "data.n_validation=32",
    "grading.timeout_s=60", "grading.start_timeout_s=600",  # which no busy machine reaches
]  # fmt: skip
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])

#: What a run by default has no use for, but a few settings do.
UNUSED = {
    "bitsandbytes", "datasets", "joblib", "math_verify", "matplotlib.pyplot", "pandas", "peft", "reasoning_gym",
    "sklearn", "submitit", "tensorboard", "torchvision", "trackio", "vllm", "wandb",
}  # fmt: skip
TELL = """
import json, sys
from pathlib import Path
from rlreason.__main__ import main
told = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["rlreason", *words]
    try:
        main()
    except SystemExit as end:
        told.append([end.code, list(sys.modules)])
Path("told").write_text(json.dumps(told))
"""


def loaded(place: Path, *commands: list[str]) -> list[tuple[int, set[str]]]:
    """Exit code and modules loaded by then of commands that one fresh Python runs one after the other."""
    argv = [sys.executable, "-c", TELL, json.dumps(commands)]
    subprocess.run(argv, cwd=place, env=os.environ | ENV, stdout=subprocess.DEVNULL, check=True)
    return [(code, set(modules)) for code, modules in json.loads((place / "told").read_text())]


def of_all_processes(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all test processes share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


class Started:
    """A command that has begun in the folder `cwd`."""

    def __init__(self, *words: str, cwd: Path, **env: str) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it in the server
        self.words, self.said = words, Path(tempfile.mkdtemp(prefix="said-"))
        self.process = FORKS.Process(target=_run, args=(words, cwd, os.environ | ENV | env, self.said))
        self.process.start()

    def finished(self, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for its end; a command that takes longer is killed."""
        self.process.join(seconds)
        late = self.process.exitcode is None
        self.process.kill()
        self.process.join()
        said = [(self.said / name).read_text("utf-8") for name in ("out", "err")]
        done = subprocess.CompletedProcess(self.words, self.process.exitcode, *said)
        shutil.rmtree(self.said)
        if late:
            raise subprocess.TimeoutExpired(self.words, seconds, done.stdout, done.stderr)
        return done


def rlreason(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A finished `rlreason WORDS`, run in the folder `cwd`."""
    return Started(*words, cwd=cwd, **env).finished()


def forked(function: Callable[..., None], *arguments: object) -> int | None:
    """The exit code of a call in a fork of this process, which changes nothing here and has all that is imported."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def subcommand(*words: object) -> int:
    """The exit code of `rlreason SUBCOMMAND ...`, in this process."""
    texts = list(map(str, words))
    chosen = named_subcommand(texts)
    assert chosen
    return exit_code_of(lambda: run_subcommand(chosen, texts[1:]))


class Subcommands:
    """Subcommands in this process, and what they say."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.said = capsys.readouterr

    def printed(self, *words: object, code: int = 0) -> str:
        """All that one prints, which ends with this exit code."""
        self.said()
        assert subcommand(*words) == code
        return self.said().out

    def figures(self, *words: object, code: int = 0) -> Any:
        """What one prints for a program."""
        return json.loads(self.printed(*words, "--json", code=code))

    def refused(self, *words: object) -> str:
        """The one line that one is refused with."""
        self.said()
        assert subcommand(*words) in (2, 3)
        said = self.said()
        assert (said.out, said.err.count("\n")) == ("", 1)
        return said.err


def _run(words: tuple[str, ...], cwd: Path, env: dict[str, str], said: Path) -> None:
    """The command, in the forked process, as `python -m rlreason` would begin it."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what runs behind `&`,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
    assert "torch" in sys.modules, "the server could not import what it is there for: FORKS"
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["rlreason", *words]
    from rlreason.__main__ import main
    from rlreason.training import train

    train.draw_curves = str  # a quarter of a small run; `python -m rlreason` draws them
    follow(env.get(AT), env.get(SIGNAL))
    main()
