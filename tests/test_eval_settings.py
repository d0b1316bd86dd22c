"""Evaluations with a prompt, a reward, a sampling and data of their own, while training goes on in its own way."""

import json
import re

import pytest

from rlreason.api.start import plain
from rlreason.cli.check import check_command_line
from rlreason.cli.compose import changed_run
from rlreason.cli.flags import composing, read
from rlreason.config.leaves import resource_dir
from rlreason.evaluation.cases import by_facts
from rlreason.evaluation.evaluator import protocol_of
from rlreason.evaluation.protocol import COURSE_REWARD, FAIL, OPEN, PARAMETERS, PASS, card_text, leaderboard
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.records.files import opened
from rlreason.records.resume import HARMLESS, changed
from rlreason.records.rows import sample_of
from rlreason.records.writer import RunWriter
from rlreason.training.jobs import start
from rlreason.training.warm_start import formats_of
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_settings import settings
from tests.starts import ROOT, SMALL, rlreason


def protocol(*words: str) -> str:
    return protocol_of(settings(*words).evaluation, [Problem("a", "1+1?", "2")], None)["hash"]  # not a chat's


def test_the_protocol_is_the_evaluations_and_not_trainings():
    """Bug: training's own prompt or temperature makes the accuracies of two runs incomparable."""
    own = ["eval.sampling.temperature=1", "eval.sampling.max_tokens=48", "prompt@eval.prompt=r1_zero_short"]
    otherwise = ["sampling.temperature=0.5", "sampling.max_tokens=64", "prompt=question_only"]
    plain = protocol()
    for words in ([*own, *otherwise], ["eval.reward=r1_zero"]):  # the last is what the prompt says anyway
        assert protocol(*words) == plain
    for words in (otherwise, ["eval.reward=own_reward:all_right"], ["eval.samples=2"], ["prompt@eval.prompt=r1_zero"]):
        assert protocol(*words) != plain


def test_how_many_problems_are_asked():
    """Bug: `eval_problems` limits one evaluation and not the other."""
    for words, *asked in (
        ([], 256, None), (["eval_problems=8"], 8, 8), (["eval.problems=8", "eval.final_problems=20"], 8, 20),
        (["algorithm=evaluate", "eval.problems=8"], 8, 8),
        (["eval=leaderboard", "model=olmo2_1b", "prompt=question_boxed"], 1024, None),
    ):  # fmt: skip
        asks = settings(*words).evaluation
        assert [asks.problems, asks.final_problems] == asked
    assert (asks.prompt.name, asks.reward, asks.sampling.temperature) == ("r1_zero", "r1_zero", 1.0)


def test_accuracy_by_a_fact_is_a_table_of_few_rows_only():
    """Bug: a fact that identifies problems becomes a table of thousands of rows."""
    problems = [Problem(str(i), "?", "1", facts={"level": f"Level {i % 2}", "source": str(i)}) for i in range(60)]
    grades = Grade(1, 1, 1, "correct"), Grade(1, 0, 0, "wrong")
    samples = [Sample(Response(p.id, [1], [1], [0.0], "", "stop"), grades[i % 2]) for i, p in enumerate(problems)]
    (found,) = by_facts(samples, problems)["accuracy_by"].values()  # 60 sources of one problem each are no table
    assert [(row["problems"], row["accuracy"]) for row in found.values()] == [(30, 1), (30, 0)]
    assert by_facts(samples, [Problem(p.id, "?", "1") for p in problems]) == {}


def test_the_tiny_model_is_taught_the_format_that_it_is_asked_in():
    """Bug: it is evaluated in a format that it was never shown."""

    def templates(*words: str) -> list[str]:
        return [form.prompt("?") for form in formats_of(settings(*words))]

    alone, shared = templates(), templates("prompt=r1_zero")
    assert templates("prompt=r1_zero", "prompt@eval.prompt=question_only") == shared
    both = templates("prompt@eval.prompt=question_only")
    assert (both[::2], both[1::2]) == (alone * len(shared), shared)


def test_a_model_is_evaluated_by_level_and_by_two_rewards_on_data_of_its_own(tokenizer, tmp_path, capsys):
    """Bug: training's prompt or data are used, levels are lost, or the second reward counts or is lost on disk."""
    Policy(build_model(len(tokenizer), width=16, layers=1, init_scale=0.3, seed=1), tokenizer).save(tmp_path / "model")
    with (tmp_path / "test.jsonl").open("w") as file:
        for i in range(12):
            row = {"problem": f"{i}+{i}?", "solution": f"\\boxed{{{2 * i}}}", "level": f"Level {1 + i % 2}"}
            print(json.dumps(row), file=file)
    run = settings(
        "algorithm=evaluate", "model=local", f"model.path={tmp_path / 'model'}", "sampling.max_tokens=6", "threads=1",
        "data@eval.data=math", f"eval.data.path={tmp_path}", "prompt@eval.prompt=r1_zero_short",
        "eval.samples=2", "log_generations=1", "eval.reward=own_reward:all_right",
    )  # fmt: skip
    start(run, RunWriter(tmp_path / "run", "seed: 0\n"), Console())
    rows = [json.loads(line) for line in (tmp_path / "run/responses.jsonl").read_text().splitlines()]
    assert (len(rows), rows[0]["facts"]) == (24, {"level": "Level 1"})
    assert rows[0]["prompt"].endswith("0+0?\nAssistant: <think>")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    sizes = {name: part["problems"] for name, part in summary["accuracy_by"]["level"].items()}
    assert sizes == {"Level 1": 6, "Level 2": 6}
    assert (summary["solved_once"], summary["protocol"]["samples per problem"]) == (1, 2)
    found = [summary[key] for key in ("accuracy", "accuracy_prompt_reward", "disagreements")]
    assert found == [1, 0, 24]
    for row in rows:
        assert (row["reward"], row["prompt_reward"]["reward"], row["prompt_reward"]["outcome"]) == (1, 0, "unformatted")
        assert sample_of(row).prompt_grade.outcome == "unformatted"
    out = capsys.readouterr().out
    assert re.search(r"\nLevel 2 +6 +1\.000", out)
    assert "24 of 24" in out


def test_responses_that_nobody_reads_again_are_the_same(tokenizer, tmp_path):
    """Bug: `eval.score=false` draws or grades other responses, is no part of a resumed run, or is not obeyed."""
    Policy(build_model(len(tokenizer), width=16, layers=1, init_scale=0.3, seed=1), tokenizer).save(tmp_path / "model")
    words = ["algorithm=evaluate", "model=local", f"model.path={tmp_path / 'model'}", "sampling.max_tokens=6",
             "threads=1", "data=stories", "data.n_train=4", "data.n_validation=4"]  # fmt: skip
    summaries, responses = [], []
    for name, more in (("read", []), ("left", ["eval.score=false"])):
        start(settings(*words, *more), RunWriter(tmp_path / name, "seed: 0\n"), Console())
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
        responses.append(list(map(json.loads, (tmp_path / name / "responses.jsonl").read_text().splitlines())))
    read, left = responses
    assert [row["response"] for row in read] == [row["response"] for row in left]
    assert summaries[0]["protocol"] == summaries[1]["protocol"]
    assert all(row["entropy"] > 0 and row["log_probs"] for row in read)
    assert not any(row.get("entropy") for row in left)
    assert all(row["log_probs"] for row in left)  # the engine's
    assert changed(*({"eval.score": score} for score in (True, False)), HARMLESS) == ""


LEADERBOARD = {"algorithm": "grpo", "data": {"name": "math", "path": "MATH"}, "eval": {"data": None}}
H100 = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "count": 2}
ORIGIN = {"model": {"parameters": PARAMETERS, "start_weights": "ab"}, "device": H100}


def summary_with(**protocol) -> dict:
    by_the_rules = {
        "prompt": (resource_dir("prompts") / "r1_zero.prompt").read_text(encoding="utf-8"), "reward": COURSE_REWARD,
        "grading.extract": "strict", "sampling.temperature": 1.0, "sampling.max_tokens": 1024, "stop": ["</answer>"],
        "problems": 5000, "samples per problem": 1,
    }  # fmt: skip
    run = {"accuracy": 0.55, "time/total": 3.5 * 3600, "data": "0123", "data_sizes": {"validation": 5000}}
    return run | {"protocol": by_the_rules | protocol}


@pytest.mark.parametrize(
    ("changed", "rule", "verdict"),
    [
        ({"prompt": "{question}"}, "prompt", FAIL), ({"reward": "mine:r1_zero_reward_fn"}, "reward", OPEN),
        ({"reward": "r1_zero"}, "reward", OPEN),  # which decides 187 of 662 pairs otherwise than the course's
        ({"sampling.temperature": 0.6}, "temperature", FAIL), ({"problems": 1024}, "problems at the end", FAIL),
        ({"model": {"parameters": 7, "start_weights": "ab"}}, "model", FAIL),
        ({"time/total": 4.1 * 3600}, "hours", FAIL), ({"earlier_parts": [{"device": H100}]}, "hours", OPEN),
        ({"data": {"name": "math"}}, "data", FAIL),  # made up, whatever it is called
        ({"algorithm": "sft"}, "imitated traces", OPEN), ({"device": H100 | {"count": 8}}, "GPUs", OPEN),
    ],
)  # fmt: skip
def test_each_rule_is_held_by_what_was_recorded(changed, rule, verdict):
    """Bug: a run that breaks a rule passes, or one that holds it fails."""
    parts = [LEADERBOARD, ORIGIN | {"earlier_parts": []}, {"time/total": 0}]
    settings, origin, whole = ({k: v for k, v in changed.items() if k in part} for part in parts)
    protocol = {k: v for k, v in changed.items() if not any(k in part for part in parts)}
    found = leaderboard(LEADERBOARD | settings, summary_with(**protocol) | whole, ORIGIN | origin)
    assert (rule, verdict) in [(row[0], row[-1]) for row in found]
    rows = leaderboard(LEADERBOARD, summary_with(), ORIGIN)  # of a run that holds them
    assert {rule: verdict for rule, *_, verdict in rows if verdict != PASS} == {"model": OPEN, "data": OPEN}
    assert "(model, data); accuracy 0.550" in card_text(rows, summary_with()).splitlines()[-1]


def test_a_set_is_asked_as_evaluations_are_but_for_its_own_settings():
    """Bug: a set's setting is lost, or changes how the run's own problems or another set are asked."""
    words = ["eval.samples=3", "eval.problems=9", "eval.sets=[stories_hard,stories_long]", "eval.sets.b.data=stories",
             "eval.sets.b.prompt=question_only", "eval.sets.b.samples=2", "eval.sets.b.problems=5",
             "eval.sets.b.sampling.temperature=0.5", "eval.final_problems=20"]  # fmt: skip
    one = check_command_line(words, note=str).one
    run = one.run
    asked = {name: of.evaluation for name, of in {"": run, **run.by_set()}.items()}
    shown = {
        name: (of.data.name, of.prompt.name, of.samples, of.problems, of.final_problems, of.sampling.temperature)
        for name, of in asked.items()
    }
    assert shown == {
        "": ("stories", "r1_zero_short", 3, 9, 20, 1.0), "b": ("stories", "question_only", 2, 5, 5, 0.5),
        **{name: (name, "r1_zero_short", 3, 9, 20, 1.0) for name in ("stories_hard", "stories_long")},
    }  # fmt: skip
    with composing(read([])):  # as a run that is resumed
        assert changed_run(plain(one.config), []).run.by_set()["b"].evaluation == asked["b"]
        words = ["+data@eval.sets.c.data=stories_hard", "+eval.sets.c.samples=4"]  # as evaluate(run, ...) adds one
        more = changed_run(plain(one.config), words).run.by_set()
    assert ([*more], more["c"].evaluation.samples) == (["stories_hard", "stories_long", "b", "c"], 4)


@pytest.mark.long
def test_sets_change_nothing_else_and_equal_an_evaluation_of_their_own(tmp_path):
    """Bug: a set moves training's random numbers, or is not measured as by a run of its own."""
    small = [*SMALL, "data.n_validation=16", "threads=1"]
    sets = ["eval.sets=[stories_hard]", "eval.sets.stories_hard.problems=6", "eval.sets.stories_hard.samples=2"]
    for name, more in (("with", sets), ("without", [])):
        assert rlreason(*small, *more, f"hydra.run.dir={name}", cwd=tmp_path).returncode == 0
    one, other = (sorted((tmp_path / name).glob("[er]*/step*")) for name in ("with", "without"))
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in other]
    words = ["algorithm=evaluate", "model=local", "model.path=with/model", "data=stories", "scale=embedded",
             "threads=1", "prompt=r1_zero_short", "sampling.max_tokens=16", "eval_problems=2",
             *SMALL[-2:], *sets]  # fmt: skip
    assert rlreason(*words, "hydra.run.dir=job", cwd=tmp_path).returncode == 0
    trained, job = (json.loads((tmp_path / name / "summary.json").read_text())["sets"] for name in ("with", "job"))
    assert trained["stories_hard"] == job["stories_hard"]
    assert (job["stories_hard"]["samples"], job["stories_hard"]["problems"]) == (12, 6)
    responses = [[json.loads(line)["response"] for line in opened(path)] for path in (
        tmp_path / "with/evals/stories_hard/step_00002.jsonl.gz", tmp_path / "job/evals/stories_hard/responses.jsonl"
    )]  # fmt: skip
    assert responses[0] == responses[1]
    assert "sets: stories_hard" in rlreason("inspect", "with", "--set", "no", cwd=tmp_path).stderr
    assert "12 responses" in rlreason("inspect", "job", "--set", "stories_hard", cwd=tmp_path).stdout
    assert "leave" in rlreason("inspect", "with", "--set", "stories_hard", "--regrade", cwd=tmp_path).stderr


@pytest.mark.long
def test_trained_in_one_way_and_validated_in_another(tmp_path):
    """Bug: an evaluation takes over training's prompt, sampling or reward."""
    own = ["eval.prompt=question_only", "eval.sampling.temperature=0.7", "eval.sampling.max_tokens=20",
           "eval.reward=own_reward:halves", "eval.samples=2", "eval.final_problems=12", "eval.problems=8"]  # fmt: skip
    small = [word for word in SMALL if not word.startswith("eval_problems")]
    done = rlreason(
        *small, "eval=leaderboard", *own, "hydra.run.dir=run", cwd=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    asked = {"reward": "own_reward:halves", "sampling.temperature": 0.7, "sampling.max_tokens": 20, "stop": []}
    assert summary["protocol"].items() >= (asked | {"problems": 12, "samples per problem": 2}).items()
    names = ("evals/step_00002", "rollouts/step_00001")
    evals, rollouts = (list(map(json.loads, opened(tmp_path / f"run/{name}.jsonl.gz"))) for name in names)
    assert len(evals) == 24
    assert summary["accuracy"] == sum(row["outcome"] == "correct" for row in evals) / 24
    assert all(row["prompt"] == row["question"] for row in evals)
    assert "prompt_reward" not in rollouts[0]
    assert rollouts[0]["prompt_ids"] != evals[0]["prompt_ids"]
    *_, last = (tmp_path / "run/compliance.md").read_text().splitlines()
    assert last in " ".join(done.stdout.split())
    assert "FAIL (model, " in last
