"""The write-up of an assignment: what is done, what was found, and what is said where nothing has been run."""

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report import assignment
from rlreason.report.assignment import DONE, IN_WORDS, NOT_YET, PARTLY, Section, course_of, runs_below, write_up
from rlreason.report.content import LIGHT
from rlreason.report.read import read_study
from rlreason.report.sections import accuracy_of
from rlreason.report.study import Setting
from rlreason.sweeps.state import read_state, write_state
from tests.sweep_folders import CONFIG, answers, ended, sweep

ROOT = Path(__file__).parents[1]
COURSES = ("cs336_2025", "cs336_2026", "pku_hw3")
HOSTILE = "</pre><script>alert(1)</script>\u202e | `x` </details>"
RATES = {"1e-6": 0.2, "1e-5": 0.5, "3e-5": 0.8, "1e-4": None}
MATH = CONFIG.replace("tiny", "qwen2_5_math_1_5b").replace("stories_long", "math")


def rates(folder: Path, name: str = "grpo_learning_rate", config: str = CONFIG) -> Path:
    """The sweep of learning rates, the last of which diverged, of 40 steps with an evaluation at each fourth."""
    of = {value: (lambda seed, c=chance: answers(seed, c) if c else None) for value, chance in RATES.items()}
    sweep(folder / name, "learning_rate", list(RATES), lambda v, s: of[v](s), reference={"learning_rate": "1e-5"})
    at = [{"rollout_step": k, "train_step": k, "time/active": 2.0 * k, "time/total": 3.0 * k} for k in range(0, 41, 4)]
    more = {"rollout/entropy": 0.3, "train/grad_norm": 0.123456789}
    rows = [json.dumps(time | more | {"eval/accuracy": time["train_step"] / 80}) + "\n" for time in at]
    for run in (folder / name).glob("*seed=*"):
        (run / "metrics.jsonl").write_text("".join(rows))
        (run / "config.yaml").write_text(config)
    return folder / name


def evaluated(folder: Path) -> Path:
    """A run of algorithm=evaluate: of 40 responses 12 are right."""
    config = CONFIG.replace("grpo", "evaluate").replace("stories_long", "stories")
    ended(folder, [k < 12 for k in range(40)], config=config)
    (folder / "evals/step_00040.jsonl").rename(folder / "responses.jsonl")
    return folder


def changed(run: Path, summary: dict | None = None, **settings: Any) -> Path:
    """The run with other settings (group__name=value) and more in its summary."""
    config = OmegaConf.load(run / "config.yaml")
    for key, value in settings.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    OmegaConf.save(config, run / "config.yaml")
    whole = json.loads((run / "summary.json").read_text()) | (summary or {})
    (run / "summary.json").write_text(json.dumps(whole))
    return run


def section(course: str, question: str, folder: Path) -> tuple[Section, str]:
    """The section of a question, and all its words."""
    (wanted,) = (one for one in course_of(course).questions if one.id == question)
    of = assignment.section_of(wanted, runs_below(course_of(course), folder))
    return of, "\n".join([*of.lines, *(line for shown in of.shown for line in shown.lines)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of what CS336 2025 asks for."""
    folder = tmp_path_factory.mktemp("runs")
    for file in rates(folder / "sweeps/grpo_assignment").glob("*/evals/*.jsonl"):
        hostile = {"response": HOSTILE, "gold": HOSTILE, "format_reward": 1.0}
        rows = [json.loads(line) | hostile for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep(folder / "sweeps/sft_filtered", "data.filter", ["none", "correct"], lambda v, s: answers(s, 0.4))
    for run in (folder / "sweeps/sft_filtered").glob("*correct*"):
        changed(run, {"data_sizes": {"train_before_filter": 3000, "train_filtered": 1308, "train": 1308}})
    evaluated(folder / "zero")
    return folder


def test_the_document(runs: Path, tmp_path: Path):
    """Bug: a question that is answered counts as open, a command cannot be typed, or a hostile text becomes HTML."""
    figures = write_up("cs336_2025", runs, tmp_path, Console()).figures
    states = {one["question"]: one["state"] for one in figures["questions"]}
    assert list(states) == [question.id for question in course_of("cs336_2025").questions]
    assert states["zero_shot"] == states["grpo_learning_rate"] == states["grpo_train_loop"] == DONE
    assert (states["sft_experiment"], states["grpo_baselines"]) == (PARTLY, NOT_YET)
    assert states["think_about_length_normalization"] == IN_WORDS
    (missing,) = (one["missing"] for one in figures["questions"] if one["question"] == "sft_experiment")
    assert [re.search(r"sweep=(\w+)", command)[1] for command in missing] == ["sft_tuning", "sft_dataset_size"]
    assert figures["problems"] == []
    page, text = ((tmp_path / name).read_text() for name in (assignment.PAGE, assignment.MARKDOWN))
    for part in (
        "`python -m rlreason -m sweep=grpo_baselines experiment=cs336_2025 data.path=MATH_DIR`",
        "has 1,308 of 3,000 traces (43.6%)",
        "Pass bar 25.0%, grpo\\_learning\\_rate: reached, as 3e-5, the best of 4 settings",
        "1e-4 diverged in 4 of 4 seeds",
        "68.7 to 74% (division by the standard deviation off and on)",
    ):
        assert part in text, part
    named = set(re.findall(rf"{assignment.FILES}/([\w.]+)", text))
    assert named == {path.name for path in (tmp_path / assignment.FILES).iterdir()} != set()
    # The page has no script, and hostile texts are text.
    assert "default-src 'none'" in html.unescape(page)
    assert not re.search(r"script-src|<script|<[^>]* (src|href|on\w+)=", page)
    assert ("\u202e" in page + text, "&lt;/pre&gt;&lt;script&gt;" in page) == (False, True)
    assert page.count("<details>") == page.count("</details>")
    assert re.search(r"^````?`?text\n</pre><script>", text, re.M)  # inside a fence
    assert not set(re.findall(r'(?:fill|stroke)="(#\w{6})"', page)) & set(LIGHT.values())  # they follow the page's


@pytest.mark.parametrize("config", [CONFIG, MATH])
def test_the_nearest_sweep_answers(config: str, tmp_path: Path):
    """Bug: a rehearsal hides the handout's own runs, or a sweep is known by its folder's name."""
    newer, mine = rates(tmp_path / "a"), rates(tmp_path / "b", config=config)
    os.utime(mine / "sweep.json", (1e9, 1e9))
    state = read_state(rates(tmp_path, "grpo_length_normalization"))
    state.sweep = "grpo_baselines"  # a sweep is what was asked for and not what its folder is called
    write_state(tmp_path / "grpo_length_normalization", state)
    found = runs_below(course_of("cs336_2025"), tmp_path)
    assert found.sweep("grpo_learning_rate").path == (newer if config == CONFIG else mine)
    assert found.sweep("grpo_baselines").path.name == "grpo_length_normalization"
    assert found.sweep("grpo_length_normalization") is None


GRPO = {"algorithm": "grpo", "rollout_batch_size": 16}
#: Question, and what else a run's summary and settings have -> what is said against it as an answer, if anything.
OTHERS = [
    ("zero_shot", {}, {"prompt__name": "question_only"}, "prompt.name=question_only"),
    ("zero_shot", {}, {"data__name": "gsm8k"}, "data is gsm8k"),
    ("zero_shot", {}, {"model__path": "mine/model"}, "was trained before"),
    ("zero_shot", {"data_sizes": {"validation": 5000}}, {}, "40 of 5000"),
    ("zero_shot", {}, {}, ""),
    ("grpo_train_loop", {}, {"algorithm": "grpo", "prompt__reward": "rlreason.grading:coin"}, "coin"),
    ("grpo_train_loop", {}, GRPO | {"train_batch_size": 8}, "is 16"),
    ("grpo_train_loop", {}, GRPO | {"train_batch_size": 16}, ""),
]


@pytest.mark.parametrize(("question", "summary", "settings", "says"), OTHERS)
def test_other_measurements(question, summary, settings, says, tmp_path: Path, monkeypatch):
    """Bug: a run of another prompt, model, data set or batch answers a question, or a trained model does."""
    monkeypatch.chdir(tmp_path)
    ended(tmp_path / "mine", answers(0, 0.5), config=CONFIG.replace("grpo", "sft"))
    (tmp_path / "mine/status.json").write_text('{"status": "finished"}')
    changed(evaluated(tmp_path / "other"), summary, **settings)
    found, said = section("cs336_2025", question, tmp_path)
    state = (NOT_YET, found.question.commands()) if says else (DONE, [])
    assert (found.state, found.missing, says in said) == (*state, True)


def test_broken_and_unfinished(tmp_path: Path):
    """Bug: a broken folder is left out in silence, or runs under way count as done."""
    (tmp_path / "grpo_baselines").mkdir()
    (tmp_path / "grpo_baselines/sweep.json").write_text("{")
    for run in list(rates(tmp_path).glob("*seed=*"))[:2]:
        (run / "summary.json").unlink()
        (run / "status.json").write_text(json.dumps({"status": "running"}))
    (problem,) = write_up("cs336_2025", tmp_path, tmp_path, Console()).figures["problems"]
    assert "grpo_baselines" in problem
    assert problem in html.unescape((tmp_path / assignment.PAGE).read_text())
    rate, _ = section("cs336_2025", "grpo_learning_rate", tmp_path)
    assert (rate.state, rate.missing) == (PARTLY, rate.question.commands())
    changed(evaluated(tmp_path / "boxed"), prompt__name="question_boxed")
    zero, said = section("cs336_2026", "zero_shot", tmp_path)
    assert (zero.state, "prompt.name=r1_zero" in said) == (PARTLY, True)


def test_bars_and_figures(tmp_path: Path):
    """Bug: a pass bar is applied to another model, or judged on the problems that chose."""
    for name, config, is_math in (("tiny", CONFIG, False), ("math", MATH, True)):
        rates(tmp_path / name, config=config)
        _, said = section("cs336_2025", "grpo_learning_rate", tmp_path / name)
        assert ("says nothing" in said, "200 steps, and these runs came to 40" in said) == (not is_math, is_math)
        assert "on the other half" in said  # the problems that did not choose
    reference = read_study([rates(tmp_path, "leaderboard")]).settings
    best, said = section("cs336_2025", "leaderboard", tmp_path)
    assert f"{100 * max(np.mean(one.accuracies) for one in reference):.1f}%, the average over all" in said
    (figure,) = best.shown[0].pictures.values()
    ends = [curve.x["total"][-1] for curve in figure.curves if "total" in curve.x]
    assert (figure.axis, max(ends)) == ("total", 120)
    for runs in (reference[0].runs, reference[0].runs[:1]):  # over seeds, and of one seed over its problems
        mean, low, high = accuracy_of(Setting((), "", runs))
        assert low < mean < high
        assert mean == pytest.approx(np.mean([run.accuracy for run in runs]))
    ways = {"pass@N": [[0.2, 0.1, 0.3], [0.6, 0.5, 0.7]], "best mean log-prob": [[0.2, 0.1, 0.3], [0.3, 0.2, 0.4]]}
    run = changed(evaluated(tmp_path / "run"), {"n_list": [1, 4], "best_of_n": ways}, algorithm="best_of_n")
    _, said = section("pku_hw3", "best_of_n", tmp_path)
    assert ("a gap of 30.0 points" in said, f"{run}/best_of_n.png" in said) == (True, True)
    assert "pass@N is 20.0% at N = 1, 60.0% at N = 4" in said


def test_a_run_that_failed_answers_nothing_that_another_has_answered(tmp_path: Path):
    """Bug: a newer run without a result takes the place of a finished one, or breaks the whole write-up."""
    counted = {
        "categories": {name: {"count": n} for name, n in (("correct", 12), ("format1_wrong", 20), ("format0", 8))}
    }
    changed(evaluated(tmp_path / "whole"), counted)
    broken = evaluated(tmp_path / "newer")
    for path in (broken / "summary.json", broken / "responses.jsonl"):
        path.unlink()
    (broken / "status.json").write_text(json.dumps({"status": "interrupted"}))
    zero, said = section("cs336_2025", "zero_shot", tmp_path)
    assert (zero.state, "20 format 1, answer 0, 8 format 0" in said) == (DONE, True)
    changed_config = OmegaConf.load(broken / "config.yaml")
    OmegaConf.save(OmegaConf.merge(changed_config, {"algorithm": "best_of_n"}), broken / "config.yaml")
    assert section("pku_hw3", "best_of_n", tmp_path)[0].state == PARTLY


def test_courses(tmp_path: Path):
    """Bug: courses.yaml names a sweep or a question that is not there, or a command that no page has."""
    sweeps, page = {path.stem for path in (ROOT / "multirun_sweeps").glob("*.yaml")}, ROOT / "docs/assignments.md"
    for name in COURSES:
        course = course_of(name)
        ids = [question.id for question in course.questions]
        assert len(set(ids)) == len(ids)
        assert {one["question"] for one in course.published} <= set(ids)
        for question in course.questions:
            assert set(question.sweeps) <= sweeps
            for command in question.commands():
                assert f"experiment={name}" in command
                assert ("data.path=MATH_DIR" in command) == (name == "cs336_2025")
                assert name == "pku_hw3" or f"`{command}" in page.read_text(), command
        answer = write_up(name, tmp_path, tmp_path / name, Console())  # a folder that is made
        assert {one["state"] for one in answer.figures["questions"]} <= {NOT_YET, IN_WORDS}
    with pytest.raises(ConfigError, match="is no folder"):
        write_up("cs336_2025", tmp_path / "nowhere", tmp_path, Console())
