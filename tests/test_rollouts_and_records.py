"""Groups by id, the same problems for the same step, records that are whole or not there, and where a run is from."""

import json
import random
import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlreason import evaluate
from rlreason.config.groups import GradingConfig
from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import TOGETHER, Rollouts, rollout_metrics
from rlreason.errors import ConfigError
from rlreason.objectives.objective import Objective
from rlreason.records import files
from rlreason.records.files import opened
from rlreason.records.provenance import commit_of, package_digest, provenance
from rlreason.records.reader import RunFolder, compared, without_clock
from rlreason.records.resume import drop_later, refuse_occupied
from rlreason.records.rows import TO_LEARN, TO_SHOW, sample_of
from rlreason.records.writer import RunWriter
from rlreason.runtime.text import HIDDEN
from rlreason.training.algorithms import with_advantages
from rlreason.training.learner import Learner
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_records import append, lines_of
from tests.starts import SMALL, subcommand


def graded(problem_id, reward, ids=(1, 2)):
    response = Response(problem_id, [5], list(ids), [-0.5] * len(ids), "", "stop")
    return Sample(response, Grade(1.0, reward, reward, "correct" if reward else "wrong"))


class Echo:
    """A grader that says which ground truth each response met."""

    grading = GradingConfig(workers=1)

    def grade_batch(self, responses, golds):
        return [Grade(0.0, float(g), 0.0, "unformatted") for g in golds]


def test_advantages_follow_the_problem_id_through_a_shuffle_and_a_filter():
    """Bug: groups are formed by position, so a filtered batch compares responses to different problems."""
    samples = [graded(f"p{i // 4}", float(i % 4 == 0)) for i in range(16)]
    expected = {id(s.response): s.advantage for s in with_advantages(samples, Objective())[0]}
    assert expected[id(samples[0].response)] == pytest.approx(1.5, abs=1e-4)  # (1 - 1/4) / 0.5, unbiased std of 1000
    random.Random(1).shuffle(samples)
    for chosen in (samples, [s for s in samples if s.group != "p2"]):
        for s in with_advantages(chosen, Objective())[0]:
            assert s.advantage == pytest.approx(expected[id(s.response)], abs=1e-12)
    assert with_advantages([], Objective()) == ([], set())
    samples = [graded("a", 1.0, (1,)), graded("a", 0.0, (1,)), graded("b", 0.0, (1,)), graded("b", 0.0, (2, 3))]
    m = rollout_metrics(samples)
    assert (m["reward/mean"], m["rollout/distinct"], m["rollout/length"]) == (0.25, 0.75, 1.25)  # within groups


def test_every_metric_of_a_batch_is_what_its_name_says():
    """Bug: a metric has another's value, its opposite, or the mean of other samples."""
    samples = [
        Sample(Response("a", [5], [1], [-30.0], "", "stop"), Grade(1.0, 1.0, 1.0, "correct"), entropy=0.2),
        Sample(Response("a", [5], [1], [-30.0], "", "stop"), Grade(1.0, 1.0, 1.0, "correct"), entropy=0.4),
        Sample(Response("b", [5], [1, 2, 3], [-1.0] * 3, "", "length"), Grade(0.0, 0.0, -1.0, "unformatted")),
        Sample(Response("b", [5], [4, 5, 6, 7, 8], [-0.6] * 5, "", "stop"), Grade(1.0, 0.0, 0.0, "wrong"), entropy=0.9),
    ]
    assert rollout_metrics(samples, "eval") == pytest.approx({
        "reward/mean": 0.25, "reward/min": -1, "reward/max": 1, "reward/format": 0.75, "reward/answer": 0.5,
        "eval/length": 2.5, "eval/length_correct": 1, "eval/length_wrong": 4, "eval/length_max": 5, "eval/tokens": 10,
        "eval/truncated": 0.25, "eval/distinct": 0.75, "eval/improbable_copies": 0.25, "eval/nll": 6.6,
        "eval/entropy": 0.5, "eval/entropy_correct": 0.3, "eval/entropy_wrong": 0.9,
    })  # fmt: skip


def test_rollouts_are_graded_in_order_and_the_engine_is_never_behind_the_trainer(policy, engine, problems):
    """Bug: a response meets another problem's ground truth, a step repeats its samples, or weights are stale."""
    rollouts = Rollouts(engine, Echo(), lambda p: policy.encode_prompt(p.question), seed=0)
    learner = Learner(policy, Objective(), OptimizationConfig(1e-2))
    drawn = set()
    for step in range(3):
        samples = rollouts.sample(problems[:4], Sampling(0.7, 2, 8), n=2, purpose=step)
        assert [s.group for s in samples] == [p.id for p in problems[:4] for _ in range(2)]
        assert all(s.grade.answer == float(next(p for p in problems if p.id == s.group).answer) for s in samples)
        drawn.add(tuple(map(tuple, (s.response.token_ids for s in samples))))
        learner.temperature = 0.7
        samples = [replace(s, advantage=(-1.0) ** k) for k, s in enumerate(samples)]
        assert learner.update(samples, mismatch_from=2)["rollout/mismatch_max"] < 1e-4
        assert engine.load_weights(policy) == {}
    assert samples[0].response.weight_version == 2
    assert len(drawn) == 3


def test_what_has_ended_is_graded_together(problems):
    """Bug: one response at a time, so that `grading.workers` share nothing, or all, which are lost together."""
    sampled, sizes = threading.Event(), list[int]()

    class AtOnce:
        def generate(self, prompts, sampling, n, finished):
            responses = [Response(p.problem_id, [5], [1], [-0.5], "", "stop") for p in prompts for _ in range(n)]
            for place, response in enumerate(responses):
                finished(place, response)
            sampled.set()
            return responses

    class Slow(Echo):
        def grade_batch(self, responses, golds):
            sampled.wait()
            sizes.append(len(responses))
            return super().grade_batch(responses, golds)

    samples = Rollouts(AtOnce(), Slow(), lambda p: [5], seed=0).sample(problems[:4], Sampling(), n=2, purpose=0)
    assert [s.grade.answer for s in samples] == [float(p.answer) for p in problems[:4] for _ in range(2)]
    assert max(sizes) <= TOGETHER
    assert sum(size > 0 for size in sizes) <= 3


def test_records_are_whole_and_a_finished_run_or_another_folder_is_refused(tmp_path):
    """Bug: a second run writes into a finished one, or into a folder of the user's own."""
    folder = tmp_path / "run"
    records = RunWriter(folder, "seed: 0\n")
    records.metrics({"train_step": 1, "reward/mean": float("nan")})
    records.responses("rollouts", 1, [graded("p", 1.0)], [Problem("p", "q", "7")])
    row = json.loads(*lines_of(folder / "rollouts/step_00001.jsonl.gz"))
    assert (row["gold"], row["reward"], row["token_ids"], row["outcome"]) == ("7", 1.0, [1, 2], "correct")
    refuse_occupied(folder)  # not finished yet
    RunWriter(folder, "seed: 1\n")  # a broken-off run is started again: its records are set aside, not mixed in
    assert not (folder / "rollouts").exists()
    assert (folder / "metrics.jsonl").read_text() == ""
    assert (folder / "broken_off_1/rollouts/step_00001.jsonl.gz").exists()
    row = json.loads((folder / "broken_off_1/metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert without_clock(row) == {"train_step": 1, "reward/mean": None}
    records.summary({"status": "finished", "accuracy": 1.0})
    with pytest.raises(ConfigError, match="holds a finished run"):
        refuse_occupied(folder)
    assert not list(folder.rglob("*.partial"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("precious")
    with pytest.raises(ConfigError, match="holds"):
        refuse_occupied(tmp_path)
    assert (tmp_path / "model/weights").read_text() == "precious"


def test_responses_are_read_as_written_always_in_the_same_bytes_and_a_file_that_was_cut_is_refused(tmp_path):
    """Bug: a field is lost between writing and learning from it; a file holds its time; a torn one seems shorter."""
    log_probs, right = [-0.5, -0.25, -1.0], Grade(1.0, 1.0, 1.0, "correct")
    told = [Response("p", [5, 6], [1, n, 3], log_probs, "so </think> <answer>7</answer>", "stop") for n in range(40)]
    samples = [Sample(response, right, log_probs=log_probs) for response in told]
    for name in "ab":
        records = RunWriter(tmp_path / name, "prompt: {reward: r1_zero}\nalgorithm: grpo\nseed: 0\n")
        for kind, step in ((files.ROLLOUTS, 1), (files.ROLLOUTS, 2), (files.EVALS, 2)):
            records.responses(kind, step, samples, [Problem("p", "3+4?", "7")])
    folder, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    first, second = folder.rollouts()
    assert [sample_of(row) for row in folder.rows(first, TO_LEARN).values()] == samples
    assert first.path.read_bytes() == other.rollouts()[0].path.read_bytes()
    assert first.path.stat().st_size < len(opened(first.path).read()) / 5  # compressed
    assert compared(folder, other)[0]["responses"]
    assert subcommand("inspect", folder.path, "--regrade", "--write") == 0
    assert not compared(folder, other)[0]["responses"]
    second.path.write_bytes(second.path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=f"^{second.path} cannot be read"):
        folder.rows(second, ())
    drop_later(folder.path, {"step": 1, "lines": {}, "parts": {"validation": []}})
    assert [file.step for file in folder.rollouts()] == [1]
    assert not list((folder.path / "evals").iterdir())


FACTS = ("data", "prompts", "model", "tokenizer", "sampling", "eval_sampling", "engine", "seeds", "device")
JOB = tuple(word for word in SMALL if not word.startswith(("n_steps", "rollout_batch", "group_size", "eval_every")))


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


def facts_of(run: Any) -> dict:
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


def test_a_training_run_has_the_facts_of_its_start(finished_run, measured):
    """Bug: the weights of a training run are hashed after it, or a fact is missing."""
    facts = facts_of(finished_run)
    same = {name for name in FACTS if facts[name] == measured[name]}
    assert {"model", "tokenizer", "prompts", "device", "engine"} <= same
