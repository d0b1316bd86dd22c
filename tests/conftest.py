"""Real parts, small: a tiny Llama with its own tokenizer, an engine on its live weights, stories to answer.

Torch and transformers are imported inside the fixtures: the process that only hands the tests out needs neither.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import hypothesis
import pytest
from filelock import FileLock

from rlreason.cli.flags import Request
from rlreason.config.data import HabitsConfig
from rlreason.config.store import register
from rlreason.data.tasks import habit_trace, make_stories
from rlreason.types import Problem
from tests.broken_runs import Runs
from tests.run_settings import composed as composed_once
from tests.starts import SMALL, Subcommands, of_all_processes, rlreason

if TYPE_CHECKING:
    from rlreason.engines.hf import HFEngine
    from rlreason.model.policy import Policy

hypothesis.settings.register_profile("patient", deadline=None)  # else an example that the machine holds up has failed
hypothesis.settings.load_profile("patient")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in what a shell runs behind `&`: the tests' runs would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it, and never stop

SWEEP_OF_TWO = ("seed=0,1", "jobs=2", *SMALL, "n_steps=1", "save_model=false")
LONGEST = ("test_subcommands", "test_sweeps", "test_hostile_programs", "test_discovery_loop", "test_docs", "test_ranks")
PROMPT = "User: {question}\nAssistant: <think>"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, so that all test processes end together."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


gc.disable()  # what is loaded for the tests stays


def pytest_collection_finish() -> None:
    """Have the collector of garbage pass over what is loaded by now."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # composing a config makes many objects, and hardly any cycles
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory) -> None:
    """Start models are kept for the tests alone, by all their processes together; matplotlib's fonts stay known."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    os.environ.setdefault("MPLCONFIGDIR", str(users / "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(of_all_processes(tmp_path_factory) / "cache")


@pytest.fixture(scope="session", autouse=True)
def _hydra_store() -> None:
    register()


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> None:
    """Runs in this process draw none: half of a small run's time. `python -m rlreason` draws them."""
    import torch

    from rlreason.training import train

    torch.set_num_threads(1)  # several test processes share the cores
    train.draw_curves = str


@pytest.fixture
def composed():
    """A config from words of the command line."""
    return lambda *overrides: composed_once(*overrides, name=Request({}, list(overrides)).config_name)


@pytest.fixture
def cli(capsys) -> Subcommands:
    return Subcommands(capsys)


@pytest.fixture
def gsm8k(tmp_path) -> Path:
    """A folder with the two splits of GSM8K, one problem each."""
    for half in ("train", "test"):
        (tmp_path / f"{half}.jsonl").write_text('{"question": "1+1?", "answer": "1+1=2\\n#### 2"}\n')
    return tmp_path


class Finished(NamedTuple):
    """A folder that real commands have left, and what they printed. Tests that change it copy it first."""

    folder: Path
    printed: str


def left_by(factory: pytest.TempPathFactory, name: str, *words: str) -> Finished:
    """Run a command in the new folder `name`, once for all test processes."""
    place = of_all_processes(factory) / f"finished_{name}"
    place.mkdir(exist_ok=True)
    with FileLock(place / "lock"):
        if not (printed := place / "printed").exists():
            done = rlreason(*words, cwd=place)
            assert (done.returncode, done.stderr) == (0, "")
            printed.write_text(done.stdout)
    return Finished(place / name, printed.read_text())


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Finished:
    """A finished GRPO run of two steps with two updates each, its model, its checkpoint and an evaluation a step."""
    card = ("algorithm=grpo", "loss=grpo_clip", "epochs_per_rollout=2", "checkpoint.every=1", "hydra.run.dir=run")
    return left_by(tmp_path_factory, "run", *SMALL, *card)


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory) -> Finished:
    """A finished sweep over two seeds, side by side, of one step each."""
    return left_by(tmp_path_factory, "sweep", "-m", *SWEEP_OF_TWO, "hydra.sweep.dir=sweep")


@pytest.fixture(scope="session")
def problems() -> list[Problem]:
    return list(make_stories(64, seed=0))


@pytest.fixture(scope="session")
def tokenizer(problems):
    from rlreason.model.parameters import build_tokenizer

    rng, habits = random.Random(0), HabitsConfig(hasty_share=0.5, slip_share=0.1)
    return build_tokenizer([PROMPT.format(question=p.question) + habit_trace(p, rng, habits) for p in problems])


@pytest.fixture
def policy(tokenizer) -> Policy:
    """Random weights, large enough that different tokens have different probabilities."""
    from rlreason.model.parameters import build_model
    from rlreason.model.policy import Policy

    return Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=1), tokenizer)


@pytest.fixture
def engine(policy) -> HFEngine:
    from rlreason.engines.hf import HFEngine

    return HFEngine(policy, max_rows=32)


def random_pairs(vocab: int, count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Ragged (prompt ids, response ids) pairs."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high + 1, (), generator=g))
        return torch.randint(2, vocab, (n,), generator=g).tolist()

    return [(ids(1, 12), ids(1, 20)) for _ in range(count)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Where interrupted runs are, and those that they must equal."""
    return Runs(tmp_path_factory)
