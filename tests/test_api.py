"""Runs from Python: the same as from the command line, as often as you like, and nothing else is changed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason import Run, compose, evaluate, load_run, train
from rlreason.api.start import own_hydra
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.records.reader import without_clock

TINY = (
    "model.width=32", "model.warm_start.steps=1", "data.n_train=64", "data.n_validation=8", "eval_problems=8",
    "sampling.max_tokens=8", "n_steps=2", "rollout_batch_size=8", "group_size=4", "log_generations=0",
    "grading.workers=1",
)  # fmt: skip


def tiny(folder: Path, *words: str) -> Run:
    return train(*TINY, *words, f"hydra.run.dir={folder}", quiet=True)


def numbers(run: Run) -> list[dict[str, float]]:
    return [without_clock(row) for row in run.metrics]


def state() -> list[object]:
    """What of this process a run could change."""
    import matplotlib

    return [
        (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
        (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()),
        (dict(os.environ), list(sys.path), Path.cwd(), dict(matplotlib.rcParams)),
        (sys.stdout, sys.stderr, os.fstat(1).st_ino, os.fstat(2).st_ino, sys.excepthook, threading.excepthook),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, set(Singleton._instances)),
        (set(ConfigStore.instance().repo), dict(BaseContainer._resolvers)),
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Run:
    """A run of this process."""
    return tiny(tmp_path_factory.mktemp("done") / "run", "seed=3", "eval_every=1")


@pytest.fixture
def odd_process(tmp_path):
    """A program that uses Hydra itself, and has set things in its own way."""
    before, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    resolvers = dict(BaseContainer._resolvers)
    OmegaConf.register_new_resolver("div", lambda a, b: "theirs", replace=True)
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.yaml").write_text("mine: ${div:4,2}\n")
    with initialize_config_dir(str(tmp_path / "theirs"), version_base="1.2"):
        yield lambda: hydra_compose("config").mine
    torch.set_num_threads(before)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    BaseContainer._resolvers = resolvers


@pytest.mark.long
def test_nothing_of_the_process_is_changed_however_a_run_ends(tmp_path, done, odd_process, monkeypatch, capfd):
    monkeypatch.setenv("FOLDER_TO_BREAK", str(tmp_path / "failing"))
    before = state()
    with pytest.raises(ConfigError, match="holds a finished run"):
        tiny(done.folder)
    assert state() == before
    run = tiny(tmp_path / "good", "seed=3", "eval_every=1", "save_model=true")
    assert state() == before
    with pytest.raises(FileExistsError):
        tiny(tmp_path / "failing", "prompt.reward=own_reward:breaks_its_folder")
    assert state() == before
    assert odd_process() == "theirs"
    assert load_run(tmp_path / "failing").status == "failed"
    assert run.status == "finished"
    assert numbers(run) == numbers(done)  # whatever float type and number of threads the program has chosen
    assert run.model
    assert capfd.readouterr() == ("", "")  # quiet


def test_an_interrupted_run_is_wound_up_and_the_interrupt_raised(tmp_path):
    def interrupt() -> None:
        while not (begun.exists() and any("reward/mean" in row for row in load_run(folder).metrics)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    folder = tmp_path / "run"
    begun = folder / "metrics.jsonl"
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="after step"):
        tiny(folder, "n_steps=100000")
    run = load_run(folder)
    assert (run.status, run.accuracy, run.summary) == ("interrupted", None, {})
    assert (folder / "curves.png").exists()
    assert run.model  # Ctrl-C in a script or notebook ends the step, as on the command line
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_run_is_refused_while_one_is_under_way(tmp_path):
    """It would change threads, gradients and Hydra under the first one."""
    refused = []

    def loss(advantages, policy_log_probs):
        with pytest.raises(ConfigError, match="under way") as caught:
            tiny(tmp_path / "second")
        refused.append(caught)
        return -advantages * policy_log_probs

    assert train(*TINY, f"hydra.run.dir={tmp_path / 'first'}", loss=loss, quiet=True).status == "finished"
    assert refused


@pytest.mark.long
def test_a_config_is_read_and_changed_and_a_run_of_it_repeated(tmp_path):
    config = compose(*TINY, "prompt=r1_zero", "loss=GRPO-clip", "off_policy=e4_quarter", "hydra.run.dir=elsewhere")
    assert config.train_batch_size == 2
    config.rollout_batch_size, config.n_steps = 4, 1  # of which the batch that is trained on is computed
    config.prompt.stop = ["</answer>", "it's, [so]", "null"]
    run = train(f"hydra.run.dir={tmp_path / 'run'}", "group_size=2", config=OmegaConf.create(config), quiet=True)
    settings = run.config
    assert settings["prompt"]["stop"] == ["</answer>", "it's, [so]", "null"]
    assert (settings["rollout_batch_size"], settings["train_batch_size"], settings["group_size"]) == (4, 1, 2)
    assert settings["loss"]["loss_type"] == "grpo_clip"
    assert OmegaConf.to_container(compose(f"resume={run.folder}")) == settings
    by_type = compose(*TINY, "loss=gspo", "eval.data=stories_hard", "sampling.temperature=0.5")
    with own_hydra():
        settings = typed(by_type)
    run = train(f"hydra.run.dir={tmp_path / 'typed'}", config=settings, quiet=True)
    assert run.config == OmegaConf.to_container(by_type, resolve=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep=grpo_learning_rate"], "a loop of Python's"),
        (["-m", "seed=0"], "-m is a flag of the command line"),
        (["hydra.mode=MULTIRUN"], "would change the whole process"),
        (["nsteps=3"], "did you mean n_steps"),
        ([3], "3 is no override"),
        (["hydra.run.dir=p/../q", "group_size=3"], "group_size"),
    ],
)
def test_what_is_no_run_here_is_refused_in_one_line_and_leaves_nothing(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        train(*words)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_changed_config_is_held_to_the_same_rules():
    config = compose(*TINY)
    config.group_size = 3
    for wrong, says in ((config, "group_size"), (DictConfig({"a": 1}), "no settings"), ({"seed": 1}, "type dict")):
        with pytest.raises(ConfigError, match=says):
            train(config=wrong)


@pytest.mark.long
def test_the_model_of_a_run_is_measured_as_it_was_in_training(tmp_path):
    """The shipped model, which is right now and then; the evaluation's own settings count, not training's."""
    words = ("n_steps=1", "rollout_batch_size=8", "group_size=4", "eval_problems=16", "eval.samples=2")
    words = (*words, "eval.sampling.max_tokens=20", "sampling.max_tokens=12", "save_model=true")
    run = train(*words, f"hydra.run.dir={tmp_path / 'run'}", quiet=True)
    measured = evaluate(run, f"hydra.run.dir={tmp_path / 'measured'}", quiet=True)
    assert measured.accuracy == run.accuracy
    assert measured.summary["protocol"]["hash"] == run.summary["protocol"]["hash"]
    assert [row["response"] for row in measured.responses] == [
        row["response"] for row in run.responses if row["kind"] == "evaluation" and row["step"] == 1
    ]
    assert [row["accuracy"] for row in measured.evaluations] == [measured.accuracy]
    with pytest.raises(ConfigError, match="no saved model"):
        evaluate(measured)


def test_the_rows_of_a_run_are_flat_and_ready_for_pandas(tmp_path, done):
    pandas, run = pytest.importorskip("pandas"), done
    assert list(pandas.DataFrame(run.evaluations)["step"]) == [0, 1, 2]
    assert len(pandas.DataFrame(run.metrics)) == 5
    responses = pandas.DataFrame(run.responses)
    assert responses.groupby(["kind", "step"]).size().to_dict() == {
        ("evaluation", 0): 8, ("evaluation", 1): 8, ("evaluation", 2): 8, ("training", 1): 8, ("training", 2): 8,
    }  # fmt: skip
    assert not any(isinstance(value, dict) for row in run.responses for value in row.values())
    assert load_run(str(run.folder)).accuracy == run.accuracy == run.evaluations[-1]["final/accuracy"]
    for nothing in (tmp_path, tmp_path / "nowhere", 3):
        with pytest.raises(ConfigError, match=r"is no folder|no config\.yaml"):
            load_run(nothing)
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    run = load_run(tmp_path)
    assert (run.config, run.metrics, run.summary) == ({"algorithm": "grpo"}, [], {})


def test_the_names_are_there_at_once_and_load_nothing():
    script = (
        "import sys; import rlreason; from rlreason import load_run, Grader\n"
        "print(sorted({'torch', 'transformers', 'hydra'} & set(sys.modules)))\n"
        "from rlreason import train\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), 'train' in dir(rlreason))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert (first, second) == ("[]", "[] True")


@pytest.mark.long
def test_the_numbers_are_those_of_the_command_line(tmp_path):
    words = [*TINY, "n_grpo_steps=3", "loss=grpo_clip", "off_policy=e4_quarter"]
    words.remove("n_steps=2")
    command = [sys.executable, "-m", "rlreason", *words, f"hydra.run.dir={tmp_path / 'typed'}"]
    subprocess.run(command, check=True, capture_output=True)
    typed_run = load_run(tmp_path / "typed")
    runs = [train(*words, f"hydra.run.dir={tmp_path / str(n)}", quiet=True) for n in range(2)]
    for run in runs:
        assert numbers(run) == numbers(typed_run)
        assert run.config == typed_run.config
        assert run.responses == typed_run.responses
        assert {p.name for p in run.folder.iterdir()} == {p.name for p in typed_run.folder.iterdir()}
