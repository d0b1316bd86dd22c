"""Runs from Python: the same as from the command line, as often as you like, and nothing else is changed."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason import Run, compose, evaluate, load_run, load_sweep, train
from rlreason.api.start import own_hydra
from rlreason.config.store import as_config, typed
from rlreason.errors import ConfigError
from rlreason.records.reader import without_clock
from rlreason.report.compare import compared_study, entry
from rlreason.report.verdicts import verdicts_of
from tests.starts import rlreason
from tests.sweep_folders import answers, sweep

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
    return [
        (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
        (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()),
        (dict(os.environ), list(sys.path), Path.cwd(), dict(matplotlib.rcParams)),
        (sys.stdout, sys.stderr, os.fstat(1).st_ino, os.fstat(2).st_ino, sys.excepthook, threading.excepthook),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, set(Singleton._instances)),
        (set(ConfigStore.instance().repo), dict(BaseContainer._resolvers)),
    ]


@pytest.mark.long
def test_nothing_of_the_process_is_changed_however_a_run_ends(tmp_path, monkeypatch, capfd):
    done = tiny(tmp_path / "done", "seed=3", "eval_every=1")
    monkeypatch.setenv("FOLDER_TO_BREAK", str(tmp_path / "failing"))
    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    OmegaConf.register_new_resolver("div", lambda a, b: "theirs", replace=True)
    torch.set_num_threads(3)  # conftest's is 1
    before = state()
    with pytest.raises(ConfigError, match="holds a finished run"):
        tiny(done.folder)
    assert state() == before
    run = tiny(tmp_path / "good", "seed=3", "eval_every=1", "save_model=true")
    assert state() == before
    with pytest.raises(FileExistsError):
        tiny(tmp_path / "failing", "prompt.reward=own_reward:breaks_its_folder")
    assert state() == before
    torch.set_num_threads(1)
    assert load_run(tmp_path / "failing").status == "failed"
    assert numbers(run) == numbers(done)  # whatever number of threads the program has chosen
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
    run = load_run(folder)  # Ctrl-C in a script or notebook ends the step, as on the command line
    assert (run.status, run.accuracy, run.summary, bool(run.model)) == ("interrupted", None, {}, True)
    assert list((folder / "checkpoints").glob(f"step_{run.metrics[-1]['rollout_step']:05d}_*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_run_is_refused_while_one_is_under_way_whose_rows_are_flat(tmp_path):
    """It would change threads, gradients and Hydra under the first one."""
    refused = []

    def loss(advantages, policy_log_probs):
        with pytest.raises(ConfigError, match="under way") as caught:
            tiny(tmp_path / "second")
        refused.append(caught)
        return -advantages * policy_log_probs

    run = train(*TINY, "eval_every=1", f"hydra.run.dir={tmp_path / 'first'}", loss=loss, quiet=True)
    assert (run.status, len(run.metrics), bool(refused)) == ("finished", 5, True)
    assert [row["step"] for row in run.evaluations] == [0, 1, 2]
    steps = {("evaluation", 0): 8, ("evaluation", 1): 8, ("evaluation", 2): 8, ("training", 1): 8, ("training", 2): 8}
    assert Counter((row["kind"], row["step"]) for row in run.responses) == steps
    assert not any(isinstance(value, dict) for row in run.responses for value in row.values())
    assert load_run(str(run.folder)).accuracy == run.accuracy == run.evaluations[-1]["final/accuracy"]
    for nothing in (tmp_path, tmp_path / "nowhere", 3):
        with pytest.raises(ConfigError, match=r"is no folder|no config\.yaml"):
            load_run(nothing)


def test_a_sweep_is_frames(tmp_path, monkeypatch):
    """Bug: rows of a run stand under another setting or seed, or a verdict has other numbers than the report's."""
    sweep(tmp_path / "runs/s", "lr", ["1", "2"], lambda value, seed: answers(seed, int(value) / 4), seeds=(0, 1, 2))
    for place in (tmp_path / "runs/s").glob("lr=*"):
        rows = [{"rollout_step": step, "reward/mean": int(place.name[3]) + step} for step in range(3)]
        (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    of, verdicts = load_sweep("last"), compared_study([tmp_path / "runs/s"])
    assert load_run("last").folder.parent == tmp_path / "runs/s"
    frame = of.frame()
    assert (list(frame), len(frame)) == (["lr", "seed", "step", "reward/mean"], 18)
    assert (frame["reward/mean"] == frame["lr"].astype(int) + frame["step"]).all()
    assert of.verdicts().to_dict("records") == [entry(verdict) for verdict in verdicts_of(verdicts)]
    monkeypatch.setattr("rlreason.api.runs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        load_sweep("last")


def test_what_is_no_run_here_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, config, said in (
        ("seed=0,1", compose("seed=2"), "several values"), ("-m seed=0", None, "-m is a flag of the command line"),
        ("hydra.mode=MULTIRUN", None, "would change the whole process"), ("", DictConfig({"a": 1}), "no settings"),
        ("hydra.run.dir=p/../q", compose("group_size=3"), "group_size"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            train(*words.split(), config=config)
    assert not list(tmp_path.iterdir())


def test_a_finished_runs_model_is_measured_as_the_run_was(finished_run, tmp_path):
    """Bug: `evaluate(run)` takes another model, other problems or another protocol than the run's last evaluation."""
    run = load_run(finished_run.folder)
    measured = evaluate(run, f"hydra.run.dir={tmp_path / 'measured'}", quiet=True)
    assert measured.accuracy == run.accuracy
    assert measured.summary["protocol"]["hash"] == run.summary["protocol"]["hash"]
    with pytest.raises(ConfigError, match="no saved model"):
        evaluate(measured)


def test_objects_that_are_given_again_change_nothing(finished_run, tmp_path):
    """Bug: the rows and the reward of a run, given to its evaluation, undo its split and its judge."""
    words = ["model=local", f"model.path={finished_run.folder}", "scale=embedded", "prompt=r1_zero_short", "n_steps=1",
             "rollout_batch_size=8", "group_size=4", "sampling.max_tokens=8", "eval.reward=r1_zero", "threads=1",
             "data.split_seed=5", "data.n_validation=6", "eval_problems=4"]  # fmt: skip
    rows = [{"question": f"Mia has {k} apples, buys 2. How many?", "answer": k + 2} for k in range(24)]
    objects = {"data": rows, "reward": lambda response, truth: float("a" in response)}
    run = train(*words, f"hydra.run.dir={tmp_path / 'run'}", quiet=True, **objects)
    measured = evaluate(run, f"hydra.run.dir={tmp_path / 'measured'}", quiet=True, **objects)
    assert measured.summary["protocol"] == run.summary["protocol"]
    assert {row["question"] for row in measured.responses}.isdisjoint(
        row["question"] for row in run.responses if row["kind"] == "training"
    )
    again = train(f"resume={run.folder}", "n_steps=2", quiet=True, **objects)
    assert (again.folder, again.metrics[-1]["rollout_step"]) == (run.folder, 2)


@pytest.mark.long
def test_the_model_of_a_run_is_measured_as_it_was_in_training(tmp_path):
    """The shipped model, which is right now and then; the evaluation's own settings count, not training's."""
    words = ("n_steps=1", "rollout_batch_size=8", "group_size=4", "eval_problems=16", "eval.samples=2")
    words = (*words, "eval.sampling.max_tokens=20", "sampling.max_tokens=12", "save_model=true")
    run = train(*words, f"hydra.run.dir={tmp_path / 'run'}", quiet=True)
    measured = evaluate(run, f"hydra.run.dir={tmp_path / 'measured'}", quiet=True)
    assert measured.accuracy == run.accuracy
    assert measured.summary["protocol"]["hash"] == run.summary["protocol"]["hash"]
    texts = [row["response"] for row in run.responses if (row["kind"], row["step"]) == ("evaluation", 1)]
    assert [row["response"] for row in measured.responses] == texts


@pytest.mark.long
def test_words_a_changed_config_and_typed_settings_give_the_numbers_of_the_command_line(tmp_path):
    words = [*TINY, "loss=grpo_clip", "off_policy=e4_quarter", "prompt.stop=['</answer>','null']"]
    assert rlreason(*words, "group_size=2", "hydra.run.dir=typed", cwd=tmp_path).returncode == 0
    expected, config = load_run(tmp_path / "typed"), compose(*TINY, "loss=GRPO-clip", "off_policy=e4_quarter")
    config.prompt.stop = ["</answer>", "null"]
    changed = train("group_size=2", f"hydra.run.dir={tmp_path / 'changed'}", config=config, quiet=True)
    assert OmegaConf.to_container(compose(f"resume={changed.folder}")) == changed.config
    with own_hydra():
        settings = typed(as_config(changed.config))
    by_type = train(f"hydra.run.dir={tmp_path / 'by_type'}", config=settings, quiet=True)
    for run in (changed, by_type, tiny(tmp_path / "words", *words[len(TINY) :], "group_size=2")):
        assert numbers(run) == numbers(expected)
        assert (run.config, run.responses) == (expected.config, expected.responses)
        assert {p.name for p in run.folder.iterdir()} == {p.name for p in expected.folder.iterdir()}
