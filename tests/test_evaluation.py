"""Evaluation: the same luck for every model, protocols that tell themselves apart, and no finished problem lost."""

import json
import random
import re
import signal
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
import torch

from rlreason.cli.check import check_command_line
from rlreason.config.groups import GradingConfig
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts
from rlreason.errors import ConfigError
from rlreason.evaluation import accuracy
from rlreason.evaluation.cases import categories, figure_lines, share_table, ungraded
from rlreason.evaluation.protocol import differences, format_accuracy, make_protocol
from rlreason.grading import Grader
from rlreason.records.console import Console
from rlreason.records.files import UNFINISHED, opened
from rlreason.records.rows import ResponseLog
from rlreason.records.writer import RunWriter
from rlreason.runtime.statistics import wilson_interval
from rlreason.training.jobs import check_askable, start
from rlreason.types import Grade, Problem, Response, Sample
from tests.killed import AT
from tests.run_settings import settings
from tests.starts import rlreason

PARTS = {
    "prompt": "User: {question}\nAssistant: <think>", "reward": "r1_zero", "stop": ["</answer>"], "data": "abc",
    "grading": {"extract": "strict", "rel_tol": 1e-6}, "sampling": {"temperature": 1.0, "max_tokens": 64},
    "problems": 20, "samples per problem": 1,
}  # fmt: skip


def sample(problem_id, outcome="correct", ids=(1, 2)):
    right, form = float(outcome == "correct"), float(outcome not in ("unformatted", "error"))
    response = Response(problem_id, [5], list(ids), [-0.123456789] * len(ids), "text \u00e9", "stop")
    return Sample(response, Grade(form, right, right, outcome, "number"))


def test_every_evaluation_meets_the_same_luck(policy, engine, problems):
    """Bug: who else is asked, or how often, changes the numbers drawn, here or in training."""
    rollouts = Rollouts(engine, Grader(symbolic=False), lambda p: policy.encode_prompt(p.question), seed=3)
    sampling, seen, before = Sampling(1.0, 0, 12), [], torch.get_rng_state()

    def texts(problems, n=1, finished=None):
        return [s.text for s in rollouts.sample(problems, sampling, n, accuracy.PURPOSE, finished)]

    alone = texts(problems[:6])
    assert texts(problems[5:2:-1]) == alone[5:2:-1]
    assert texts(problems[:6], 3, lambda number, s: seen.append((s.group, number)))[::3] == alone
    assert sorted(seen) == sorted((p.id, number) for p in problems[:6] for number in range(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_interval_counts_questions_and_not_samples():
    """Bug: four questions 32 times counted as 128 problems, with an interval of four hundredths of its width."""
    samples = [sample(f"p{i}", "correct" if i < 3 else "wrong") for i in range(9) for _ in range(4)]
    mismatches = accuracy.mismatches_of(samples, Sampling())
    found = accuracy.eval_metrics(samples, mismatches, {})
    assert found["eval/accuracy"] == pytest.approx(1 / 3)
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == pytest.approx(wilson_interval(3, 9))
    assert (found["eval/problems"], found["eval/samples"], "eval/questions" in found) == (9, 36, False)
    samples = [sample(f"p{i}", "wrong") for i in range(128)]
    problems = [Problem(f"p{i}", f"What is {i % 4} times 2?", "0") for i in range(128)]
    found = accuracy.eval_metrics(samples, mismatches, accuracy.questions_of(problems))
    assert (found["eval/problems"], found["eval/questions"]) == (128, 4)
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == pytest.approx(wilson_interval(0, 4))
    assert categories(samples, problems)["correct"]["interval"] == pytest.approx(list(wilson_interval(0, 4)))


def test_every_response_is_in_one_category_and_what_is_kept_of_it_gives_the_same_figures():
    """Bug: figures of freed samples differ from those of whole ones, or an outcome is in no category."""
    outcomes = ("correct", "wrong", "timeout", "unformatted", "error")
    samples = [
        replace(sample(f"p{i}", one, ids=[1] * i), entropy=0.5, log_probs=[-0.2] * i) for i, one in enumerate(outcomes)
    ]
    rows, failed = categories(samples), ungraded(samples)
    assert [row["count"] for row in rows.values()] == [1, 2, 2]
    assert all(row["interval"][0] < row["share"] < row["interval"][1] for row in rows.values())
    assert re.search(r"format1_wrong +2 +0\.400", share_table("category", rows))
    mismatches = accuracy.mismatches_of(samples, Sampling(min_tokens=1))
    assert len(mismatches) == sum(max(s.length - 1, 0) for s in samples)
    whole = [replace(s, prompt_grade=s.grade) for s in samples]
    kept = [accuracy.figures_of(s) for s in whole]
    assert accuracy.eval_metrics(kept, mismatches, {}) == accuracy.eval_metrics(whole, mismatches, {})
    assert (categories(kept), ungraded(kept)) == (rows, failed)
    assert "1 timeout, 1 error" in figure_lines(accuracy.eval_metrics(kept, mismatches, {}), 64, failed)


def test_protocols_differ_in_whatever_changes_an_accuracy_and_in_nothing_else():
    """Bug: accuracies of two prompts, graders or stop strings are compared as if they were one."""
    one = make_protocol(PARTS)
    assert one == make_protocol(dict(reversed(PARTS.items())))
    assert f"protocol {one['hash']}" in format_accuracy(0.5, 0.4, 0.6, one)
    for part, value, difference in (
        ("prompt", PARTS["prompt"] + "\n", "prompt: "),
        ("grading", {"extract": "sentence", "rel_tol": 1e-6}, "grading.extract: strict and sentence"),
        ("stop", [], "stop: ['</answer>'] and []"),
    ):
        other = make_protocol({**PARTS, part: value})
        (line,) = differences(one, other)
        assert (one["hash"] != other["hash"], line.startswith(difference)) == (True, True)
    (line,) = differences(*(make_protocol({**PARTS, "prompt": "x" * 300 + end + "y" * 300}) for end in "AB"))
    assert ("xA" in line, "xB" in line, len(line) < 150) == (True, True, True)  # long ones from where they part


def test_finished_problems_survive_and_torn_lines_do_not(tmp_path, capsys):
    """Bug: a torn line, or the log of another model, spoils what is resumed."""
    problems = [Problem(f"p{i}", f"{i}?", str(i)) for i in range(3)]
    log = tmp_path / UNFINISHED
    store = ResponseLog(tmp_path, "one", problems, 2)
    for id, number in (("p1", 1), ("p1", 0), ("p2", 0)):  # the second response to p2 never ends
        store.add(number, sample(id, ids=(7, number)))
    with log.open("a") as file:
        file.write('{"problem_id": "p0", "samp')
    again = ResponseLog(tmp_path, "one", problems, 2)
    assert f"{log}: left out 1 of its lines: line 5 " in capsys.readouterr().err
    assert again.samples == {"p1": [sample("p1", ids=(7, number)) for number in (0, 1)]}  # every field, in full
    again.add(0, sample("p0"))
    assert all(json.loads(line) for line in log.read_text().splitlines())
    for model in ("two", "one"):
        with pytest.raises(ConfigError, match="another model"):
            ResponseLog(tmp_path, model, problems, 2)
        log.write_text(log.read_text().replace("{", "", 1))  # nobody knows whose they are


def test_only_the_same_settings_go_on_in_a_folder(tmp_path):
    """Bug: responses under two settings are counted as one evaluation."""

    def entered(words: str) -> bool:
        return RunWriter(tmp_path, f"algorithm: evaluate\nseed: 0\n{words}", trains=False).resumed

    same = "sampling:\n  max_tokens: 48\n"
    assert not entered(same)
    (tmp_path / UNFINISHED).write_text("")
    assert entered(same)
    assert entered(f"threads: 2\n{same}")  # only speed
    assert len(json.loads((tmp_path / "provenance.json").read_text())["earlier_parts"]) == 2
    with pytest.raises(ConfigError, match=r"sampling.max_tokens=48 there, 64 here"):
        entered("sampling:\n  max_tokens: 64\n")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run"):
        entered(same)


def test_nothing_to_grade_is_one_line_with_the_cure():
    """Bug: an empty ground truth is graded, as wrong."""
    empty = [Problem("a", "?", "1"), Problem("b", "?", " ")]
    for problems, says in (([], "split=train"), (empty, r"\(b\).*\(eval\.data\.gold\)")):
        with pytest.raises(ConfigError, match=says):
            check_askable(problems, "split=train of data=x", "eval.data")


SMALL = [
    "model.width=32", "model.warm_start.steps=4", "sampling.max_tokens=32", "data.n_train=256",
    "data.n_validation=96", "eval_problems=48", "log_generations=0",
]  # fmt: skip


@pytest.mark.long
def test_killed_in_the_middle_and_started_again_it_leaves_the_same_file(tmp_path):
    """Bug: the file depends on where the job was killed."""
    words = [*SMALL, "algorithm=evaluate", "samples=2", "rollout.max_rows=4"]
    at, log = {AT: "rlreason.records.rows:ResponseLog.add:return:25"}, tmp_path / "killed" / UNFINISHED
    assert rlreason(*words, "hydra.run.dir=killed", cwd=tmp_path, **at).returncode == -signal.SIGKILL
    assert {path.name for path in log.parent.iterdir()}.isdisjoint({"responses.jsonl", "summary.json"})
    answered = Counter(json.loads(line)["problem_id"] for line in log.read_text().splitlines()[1:])
    finished = [id for id, responses in answered.items() if responses == 2]
    assert 5 < len(finished) < 48
    again, whole = (rlreason(*words, f"hydra.run.dir={name}", cwd=tmp_path) for name in ("killed", "whole"))
    assert again.returncode == 0, again.stderr
    assert whole.stdout.count("protocol") == 1
    for name in ("responses.jsonl", "pass_rates.jsonl", "config.yaml"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    one, other = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("killed", "whole"))
    assert one["problems_kept_from_before"] == len(finished)
    assert all(one[key] == other[key] for key in ("accuracy", "protocol", "weights"))
    assert not log.exists()


def test_best_of_n_asks_once_and_agrees_with_itself(tmp_path, monkeypatch, capsys):
    """Bug: the curves at N=1 differ from the accuracy, or a file of the job is missing."""
    (tmp_path / "brief_scores.py").write_text("def brevity(question, response):\n    return -len(response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = [*SMALL, "algorithm=best_of_n", "n_list=[1,2,4]", "split=train", "scorer=brief_scores:brevity"]
    folder = tmp_path / "b"
    check_command_line([*words, f"hydra.run.dir={folder}"])
    start(settings(*words), RunWriter(folder, "seed: 0\n", trains=False), Console())
    summary, out = json.loads((folder / "summary.json").read_text()), capsys.readouterr().out
    assert summary["data_sizes"] == {"train_read": 256, "train": 256, "validation": 96}
    assert summary["seconds"] == pytest.approx(sum(summary["phases"].values()), abs=0.1)  # not of sampling alone
    assert len(summary["best_of_n"]) == 5
    for way, points in summary["best_of_n"].items():
        assert points[0][0] == pytest.approx(summary["accuracy"]), way
        assert len(points) == 3
    passed = [value for value, _, _ in summary["best_of_n"]["pass@N"]]
    assert passed == sorted(passed)
    rates, rows = (list(map(json.loads, opened(folder / f"{name}.jsonl"))) for name in ("pass_rates", "responses"))
    assert sum(r["correct"] for r in rates) / (4 * 48) == pytest.approx(summary["accuracy"])
    assert all(r["samples"] == 4 and len(r["question_hash"]) == 16 for r in rates)
    assert len(rows) == 4 * 48
    assert {"best_of_n.csv", "best_of_n.png", "metrics.jsonl"} <= {p.name for p in folder.iterdir()}
    assert f"protocol {summary['protocol']['hash']}" in out
    first = [r["outcome"] == "correct" for r in rows if r["sample"] == 0]
    assert (len(first), sum(first) / 48) == (48, summary["first_samples"]["accuracy"])
    assert f"accuracy {summary['first_samples']['accuracy']:.3f} (" in out


def enumerated(n, k, win):
    """The mean of `win(subset)` over every subset of k of n."""
    return fmean(float(win(subset)) for subset in combinations(range(n), k))


def best_wins(subset, scores, right):
    """The share of right responses among those of the highest score: ties are broken at random."""
    top = max(scores[i] for i in subset)
    return fmean(right[i] for i in subset if scores[i] == top)


def majority_wins(subset, answers, right):
    """By counting: the one most frequent answer, by the share of right responses that give it."""
    votes = Counter(answers[i] for i in subset if answers[i] is not None).most_common(2)
    if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
        return 0.0
    return fmean(right[i] for i in subset if answers[i] == votes[0][0])


def test_pass_at_best_at_and_majority_at_are_expectations_over_subsets():
    """Bug: an estimator is biased, by ties or by votes that nobody gave."""
    for n in range(1, 8):
        for c, k in product(range(n + 1), range(1, n + 1)):
            assert accuracy.pass_at(n, c, k) == pytest.approx(enumerated(n, k, lambda s, c=c: min(s) < c), abs=1e-12)
    assert 0 < accuracy.pass_at(10_000, 1, 3) < 1e-3  # large counts stay exact
    assert accuracy.pass_at(10_000, 9_999, 2) == 1.0
    for seed in range(12):
        rng = random.Random(seed)
        n = rng.randint(1, 9)
        right = [rng.random() < 0.4 for _ in range(n)]
        scores = [rng.choice([0.1, 0.2, rng.random()]) for _ in range(n)]  # with ties
        answers = [rng.choice([0, 1, 2, None]) for _ in range(n)]
        for k in range(1, n + 1):
            best = enumerated(n, k, lambda s, scores=scores, right=right: best_wins(s, scores, right))
            votes = enumerated(n, k, lambda s, a=answers, r=right: majority_wins(s, a, r))
            assert accuracy.best_at(scores, right, k) == pytest.approx(best, abs=1e-12)
            assert accuracy.majority_at(answers, right, accuracy.subsets_of(n, k)) == pytest.approx(votes, abs=1e-12)
    some = accuracy.subsets_of(12, 5, seed=1, most=1)  # random ones
    assert all(len(set(row)) == 5 for row in some.tolist())
    assert np.array_equal(some, accuracy.subsets_of(12, 5, seed=1, most=1))


def test_votes_are_equal_by_the_graders_rules_right_or_wrong():
    """Bug: 0.5 and 1/2 split the vote."""
    told = ["\\boxed{0.5}", "\\boxed{\\frac12}", "it is 7", "\\boxed{7}", "\\boxed{7.0}", "\\boxed{}"]
    assert accuracy.answer_classes(told, Grader(reward="question_only")) == [0, 0, None, 1, 1, None]
    said = [f"</think> <answer>{text}</answer>" for text in ("It costs 18 dollars", "18", "19")]
    assert accuracy.answer_classes(said, Grader(GradingConfig(extract="sentence"))) == [0, 0, 1]  # as they are graded
    assert accuracy.answer_classes(said, Grader()) == [0, 1, 2]
