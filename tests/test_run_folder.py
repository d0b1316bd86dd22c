"""One reader of the run folder: broken lines, unfinished runs; and what a run says of its origin."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from rlreason import Run, evaluate, train
from rlreason.records import files
from rlreason.records.provenance import commit_of, package_digest, provenance
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_SHOW
from rlreason.records.writer import RunWriter
from rlreason.runtime.text import HIDDEN
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_records import append
from tests.test_api import TINY

FACTS = ("data", "prompts", "model", "tokenizer", "sampling", "eval_sampling", "engine", "seeds", "device")
JOB = tuple(word for word in TINY if not word.startswith(("n_steps", "rollout_batch", "group_size")))


@pytest.fixture
def run(tmp_path):
    """A run that is under way: settings, a row of metrics and a step of rollouts; no summary."""
    folder = tmp_path / "run"
    records = RunWriter(folder, "algorithm: grpo\nprompt: {reward: r1_zero}\nmodel: {name: m}\nseed: 0\n")
    records.metrics({"train_step": 0, "eval_step": 1, "eval/accuracy": 0.5})
    response = Response("p", [5], [1], [-0.5], "</think> <answer>7</answer>", "stop")
    sample = Sample(response, Grade(1.0, 1.0, 1.0, "correct"))
    records.responses(files.ROLLOUTS, 1, [sample], [Problem("p", "How many?", "7")])
    return folder


@pytest.mark.parametrize("number", range(4))
def test_a_broken_line_is_named_and_the_others_are_read(run, number):
    """Bug: half a line of a killed process makes the whole file unreadable."""
    half, no_text, deep = b'{"step": 1, "resp', b'{"response": "\xff"}\n', b"[" * 100_000 + b"\n"
    said = list[str]()
    folder = RunFolder(run, said.append)
    responses = folder.rollouts()[0]
    append(responses.path, (half, no_text, deep, b'{"outcome": "correct", "gold": "7"}\n')[number])
    assert len(folder.rows(responses, TO_SHOW)) == 1
    assert said[0].startswith(f"{responses.path}: left out 1 of its lines: line 2 ")
    assert ("no 'response'" if number == 3 else "no JSON object") in said[0]


def test_an_unfinished_run_has_no_summary_and_a_broken_file_is_named(run):
    """Bug: a half-written summary counts as the end of a run, or is read in silence."""
    folder = RunFolder(run)
    assert (folder.status, folder.summary, folder.model) == ("running", None, None)
    for name in ("summary.json", "provenance.json", "status.json"):
        (run / name).write_text('{"status": "fin')
    said = list[str]()
    folder = RunFolder(run, said.append)
    assert (folder.provenance, folder.summary, folder.status) == ({}, None, None)
    assert [Path(text.partition(" ")[0]).name for text in said] == ["provenance.json", "summary.json"]


def test_a_checkout_has_a_commit_and_says_whether_files_differ_from_it(tmp_path):
    """Bug: a run of changed files names a commit that it was not, or git starts a program that a repository names."""
    checkout, trap = tmp_path / "checkout", tmp_path / "trap"
    checkout.mkdir()
    (checkout / "a é.py").write_text("one = 1\n")
    trap.write_text(f"#!/bin/sh\ntouch '{tmp_path}/sprung'\n")
    trap.chmod(0o755)
    commit = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    for words in (("init", "-q"), ("add", "-A"), commit, ("config", "core.fsmonitor", str(trap))):
        subprocess.run(["git", "-C", checkout, *words], check=True)
    commit = commit_of(checkout)
    assert re.fullmatch("[0-9a-f]{40}", commit or "")
    (checkout / "a é.py").write_text("two = 2\n")
    assert (commit_of(checkout), commit_of(tmp_path)) == (f"{commit}+changes", None)
    assert not (tmp_path / "sprung").exists()


def test_provenance_names_the_machine_and_neither_its_host_nor_other_variables(monkeypatch):
    """Bug: a shared run folder says whose machine it was, or keeps a secret of the command line."""
    for name, value in {"OMP_NUM_THREADS": "3", "PRIVATE": "my-own-business", "RLREASON_JOB_OF_SWEEP": "grid"}.items():
        monkeypatch.setenv(name, value)
    facts = provenance(["seed=1", "logger.token=swordfish1"])
    assert facts["command"] == f"python -m rlreason seed=1 'logger.token={HIDDEN}'"
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert {"torch", "tokenizers", "transformers"} <= facts["packages"].keys()
    assert (facts["code"], facts["directory"], facts["sweep"]) == (package_digest(), str(Path.cwd()), "grid")
    assert "my-own-business" not in json.dumps(facts)
    assert not {"host", "hostname", "user"} & (facts.keys() | facts["hardware"].keys())


def facts_of(run: Run) -> dict:
    return json.loads((run.folder / "provenance.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """The facts of an evaluation."""
    run = evaluate(*JOB, f"hydra.run.dir={tmp_path_factory.mktemp('measured') / 'run'}", quiet=True)
    assert facts_of(run)["model"]["start_weights"] == run.summary["weights"]
    return facts_of(run)


@pytest.mark.parametrize(
    ("words", "other"),
    [
        ("seed=5 data.n_validation=9", {"seeds", "data"}),
        pytest.param("model.seed=1 rollout.max_rows=2", {"model", "seeds", "engine"}, marks=pytest.mark.long),
        pytest.param("prompt=r1_zero", {"prompts", "model", "tokenizer"}, marks=pytest.mark.long),
        pytest.param("sampling.temperature=0.5", {"sampling", "eval_sampling"}, marks=pytest.mark.long),
    ],
)
def test_each_fact_follows_its_setting_alone(words, other, measured, tmp_path):
    """Bug: a fact that says nothing of its setting, so that a run resumes on other data."""
    facts = facts_of(evaluate(*JOB, *words.split(), f"hydra.run.dir={tmp_path / 'run'}", quiet=True))
    assert {name for name in FACTS if facts[name] != measured[name]} == other


def test_a_training_run_has_the_facts_of_its_start(tmp_path, measured):
    """Bug: the weights of a training run are hashed after it, or a fact is missing."""
    facts = facts_of(train(*TINY, f"hydra.run.dir={tmp_path / 'run'}", quiet=True))
    same = {name for name in FACTS if facts[name] == measured[name]}
    assert {"model", "tokenizer", "prompts", "device", "engine"} <= same
