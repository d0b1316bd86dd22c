"""Evaluations with a prompt, a reward, a sampling and data of their own, while training goes on in its own way."""

import gzip
import json
import re
from pathlib import Path

import pytest
from test_end_to_end import SMALL, rlreason

from rlreason.cli.check import check_command_line
from rlreason.config.conflicts import sampling_key
from rlreason.data.prepare import load_data
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts
from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import describe_accuracies, eval_metrics, mismatches_of, more_accuracies
from rlreason.evaluation.cases import by_facts, share_table
from rlreason.evaluation.evaluator import protocol_of
from rlreason.grading import Grader
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.records.rows import response_row, sample_of
from rlreason.records.writer import RunWriter
from rlreason.training.jobs import start
from rlreason.training.warm_start import formats_of
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_settings import settings

TESTS = Path(__file__).parent
FILES = ["algorithm=evaluate", "model=smollm2_135m"]
SHORT = "eval.sampling.max_tokens=64"  # as the tiny model's context asks for


def protocol(*words: str) -> str:
    return protocol_of(settings(*words).evaluation, [Problem("a", "1+1?", "2")], None)["hash"]  # not a chat's


def test_the_protocol_is_the_evaluations_and_not_trainings():
    as_training = protocol()
    own = ["eval.sampling.temperature=1", "eval.sampling.max_tokens=48", "prompt@eval.prompt=r1_zero_short"]
    assert protocol(*own) == as_training
    otherwise = ["sampling.temperature=0.5", "sampling.max_tokens=64", "prompt=question_only"]
    assert protocol(*otherwise) != as_training
    assert protocol(*own, *otherwise) == as_training
    assert protocol("eval.reward=own_reward:all_right") != as_training
    assert protocol("eval.samples=2") != as_training
    assert protocol("prompt@eval.prompt=r1_zero") != as_training
    assert protocol("eval.reward=r1_zero") == as_training  # what the prompt says anyway


def test_how_many_problems_are_asked():
    for words, *asked in (
        ([], 256, None),
        (["eval_problems=8"], 8, 8),
        (["eval.problems=8", "eval.final_problems=20"], 8, 20),
        (["eval.final_problems=20"], 20, 20),  # the last evaluation asks the others' again
        (["algorithm=evaluate", "eval.problems=8"], 8, 8),
        (["eval=leaderboard", "model=olmo2_1b", "prompt=question_boxed"], 1024, None),
    ):
        asks = settings(*words).evaluation
        assert [asks.problems, asks.final_problems] == asked
    assert (asks.prompt.name, asks.reward, asks.sampling.temperature) == ("r1_zero", "r1_zero", 1.0)
    own = settings("prompt@eval.prompt=r1_zero", "eval.prompt.stop=[]", "eval.sampling.max_tokens=9")
    assert sampling_key(own, "max_tokens") == "eval.sampling.max_tokens"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval.prompt=r1_hero"], "r1_zero?"),
        (["eval.reward=:f"], "eval.reward="),
        (["interim_eval_problems=32", "eval.final_problems=16"], "interim_eval_problems=32"),
        (["algorithm=evaluate", "split=train", "eval.data=stories_hard"], "data=stories_hard"),
        ([*FILES, "eval.data=jsonl", "eval.data.path=/"], "eval.data.path=/"),
        (["eval.sampling.max_tokens=2"], "sampling.min_tokens=4"),
        (["eval.samples=2", "eval.sampling.temperature=0"], "eval.sampling.temperature=1"),
        (["eval.problems=9", "eval.final_problems=8"], "eval.final_problems=8"),
        (["eval.data=gsm8k"], "model=tiny"),
        (["-m", "eval.prompt=null,r1_zero"], "eval.prompt=null is no option"),
    ],
)
def test_a_mistake_is_one_line_with_the_cure(words, says):
    with pytest.raises(ConfigError) as error:
        check_command_line(words, note=str)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_what_is_wrong_in_an_evaluations_data_is_said_of_its_settings(tmp_path, capsys):
    for name, answer in (("train", "1"), ("validation", ""), ("long", "1" * 50)):
        row = {"question": f"q{answer}"} | ({"answer": answer} if answer else {"response": "so"})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    (tmp_path / "data.jsonl").write_text("{\n")

    def said(*words: str) -> str:
        own = [f"eval.data.path={tmp_path}", *(f"eval.data.{word}" for word in words)]
        run = settings(*FILES, "data@eval.data=jsonl", *own)
        with Grader(symbolic=False) as grader, pytest.raises(ConfigError) as error:
            load_data(run, grader=grader)
        return str(error.value)

    assert said("n_validation=9").startswith("eval.data.n_validation=9 ")
    assert "eval.data.fields.answer" in said("validation=validation")
    assert "eval.data.bad_rows=skip" in said(f"validation={tmp_path / 'data.jsonl'}")
    assert "eval.data.max_chars=9" in said("validation=long", "max_chars=9")
    assert "eval.data.ground_truth=train" in said("validation=validation", "ground_truth=train")
    run = settings(*FILES, "data@eval.data=jsonl", f"eval.data.path={tmp_path}", "eval.data.n_validation=8")
    assert len(load_data(run).validation) == 8  # all of them may be asked, where none is learned from


def test_two_rewards_grade_every_response_and_both_verdicts_are_kept(policy, engine, problems, monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))
    with Grader(symbolic=False) as ours, Grader(reward="own_reward:all_right") as theirs:
        rollouts = Rollouts(engine, theirs, lambda p: policy.encode_prompt(p.question), 3, second_grader=ours)
        samples = rollouts.sample(problems[:4], Sampling(1.0, 0, 8), 2, "eval")
    metrics = eval_metrics(samples, mismatches_of(samples, Sampling(1.0, 0, 8)))
    assert (metrics["eval/accuracy"], metrics["eval/accuracy_prompt_reward"]) == (1, 0)
    assert (metrics["eval/disagreements"], metrics["eval/samples"], metrics["eval/solved_once"]) == (8, 8, 1)
    by_id = {p.id: p for p in problems}
    for s in samples:
        row = json.loads(json.dumps(response_row(0, s, by_id[s.group])))
        assert (row["reward"], row["prompt_reward"]["reward"], row["prompt_reward"]["outcome"]) == (1, 0, "unformatted")
        assert sample_of(row).prompt_grade == s.prompt_grade
    more = more_accuracies(metrics, "own_reward:all_right", "r1_zero")
    both, apart = describe_accuracies(1.0, more)[1:]
    assert re.findall(r"[01]\.000|8 of 8", both + apart) == ["1.000", "0.000", "8 of 8"]


MATH = [
    {"problem": f"What is {i}+{i}?", "level": f"Level {1 + i % 2}", "type": ("Algebra", "Geometry")[i % 3 == 0],
     "solution": f"It is $\\boxed{{{2 * i}}}$."}
    for i in range(12)
]  # fmt: skip


def test_accuracy_by_a_fact_is_a_table_of_few_rows_only():
    problems = [Problem(str(i), "?", "1", facts={"level": f"Level {i % 2}", "source": str(i)}) for i in range(60)]
    grades = Grade(1, 1, 1, "correct"), Grade(1, 0, 0, "wrong")
    samples = [Sample(Response(p.id, [1], [1], [0.0], "", "stop"), grades[i % 2]) for i, p in enumerate(problems)]
    found = by_facts(samples, problems)["accuracy_by"]
    assert list(found) == ["level"]  # 60 sources of one problem each are no table
    assert [(row["problems"], row["accuracy"]) for row in found["level"].values()] == [(30, 1), (30, 0)]
    assert len(share_table("level", found["level"]).splitlines()) == 3
    assert by_facts(samples, [Problem(p.id, "?", "1") for p in problems]) == {}


def test_the_tiny_model_is_taught_the_format_that_it_is_asked_in():
    def templates(*words: str) -> list[str]:
        return [form.prompt("?") for form in formats_of(settings(*words))]

    alone, shared = templates(), templates("prompt=r1_zero")
    assert templates("prompt@eval.prompt=r1_zero_short") == alone
    assert templates("prompt=r1_zero", "prompt@eval.prompt=question_only") == shared
    both = templates("prompt@eval.prompt=question_only")
    assert both[::2] == alone * len(shared)
    assert both[1::2] == shared


def test_a_model_is_evaluated_by_level_on_data_of_its_own(tokenizer, tmp_path, capsys):
    Policy(build_model(len(tokenizer), width=16, layers=1, init_scale=0.3, seed=1), tokenizer).save(tmp_path / "model")
    (tmp_path / "math").mkdir()
    (tmp_path / "math/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATH))
    run = settings(
        "algorithm=evaluate", "model=local", f"model.path={tmp_path / 'model'}", "sampling.max_tokens=6", "threads=1",
        "data@eval.data=math", f"eval.data.path={tmp_path / 'math'}", "prompt@eval.prompt=r1_zero_short",
        "eval.samples=2", "log_generations=1",
    )  # fmt: skip
    start(run, RunWriter(tmp_path / "run", "seed: 0\n"), Console())
    rows = [json.loads(line) for line in (tmp_path / "run/responses.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert rows[0]["facts"] == {"level": "Level 1", "subject": "Geometry"}
    assert rows[0]["prompt"].endswith("What is 0+0?\nAssistant: <think>")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    sizes = {
        fact: {name: part["problems"] for name, part in parts.items()} for fact, parts in summary["accuracy_by"].items()
    }
    assert sizes == {"level": {"Level 1": 6, "Level 2": 6}, "subject": {"Algebra": 8, "Geometry": 4}}
    assert summary["solved_once"] == 0
    assert summary["protocol"]["samples per problem"] == 2
    out = capsys.readouterr().out
    assert re.search(r"asks +12 .*prompt=r1_zero_short", out)
    assert re.search(r"\nLevel 2 +6 +0\.000", out)


@pytest.mark.long
def test_trained_in_one_way_and_validated_in_another(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def longer(response, ground_truth, fast=True):\n"
        "    right = float(len(response) > 40)\n"
        "    return {'format_reward': 1.0, 'answer_reward': right, 'reward': right}\n"
    )
    own = ["eval.prompt=question_only", "eval.sampling.temperature=0.7", "eval.sampling.max_tokens=20",
           "eval.reward=mine:longer", "eval.samples=2", "eval.final_problems=12", "eval.problems=8"]  # fmt: skip
    small = [word for word in SMALL if not word.startswith("eval_problems")]
    done = rlreason(*small, *own, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    asked = {"reward": "mine:longer", "sampling.temperature": 0.7, "sampling.max_tokens": 20, "stop": []}
    assert summary["protocol"].items() >= (asked | {"problems": 12, "samples per problem": 2}).items()
    assert summary["rewards"] == {"accuracy": "mine:longer", "accuracy_prompt_reward": "question_only"}
    evals, rollouts = tmp_path / "run/evals/step_00002.jsonl.gz", tmp_path / "run/rollouts/step_00001.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(evals.read_bytes()).splitlines()]
    assert len(rows) == 24
    assert summary["accuracy"] == sum(row["outcome"] == "correct" for row in rows) / 24
    verdicts = [(row["outcome"] == "correct", row["prompt_reward"]["outcome"] == "correct") for row in rows]
    assert summary["disagreements"] == sum(one != other for one, other in verdicts)
    assert all(row["prompt"] == row["question"] for row in rows)
    learned = json.loads(gzip.decompress(rollouts.read_bytes()).splitlines()[0])
    assert "prompt_reward" not in learned
    assert learned["prompt_ids"] != rows[0]["prompt_ids"]
    assert f"mine:longer {summary['accuracy']:.3f}" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    assert all("eval/disagreements" in row and row["eval/mismatch_max"] < 1e-3 for row in evaluated)
