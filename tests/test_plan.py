"""What a sweep says before its first run, `rlreason plan`, and hours for a card that is not here."""

import dataclasses
import re
from dataclasses import replace

import pytest

from rlreason.cli.plan import SweepCost, fitting_sweeps
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.model.hours import CARDS, PARAMETERS, hours, tokens_of
from rlreason.report.assignment import course_of
from rlreason.sweeps.launcher import Jobs
from rlreason.sweeps.state import RunState, SweepState, read_state, write_state
from rlreason.sweeps.texts import ONE_ON_POLICY, plan_text
from tests.run_settings import altered
from tests.starts import rlreason
from tests.sweep_folders import answers, checked, sweep

VALUES = ["1e-4", "1e-3", "1e-2"]


def design(seeds: int = 4) -> SweepState:
    runs = [RunState(f"learning_rate={v},seed={s}", [], {"learning_rate": v}, s) for v in VALUES for s in range(seeds)]
    return SweepState("lr", "", ["learning_rate"], {"learning_rate": "1e-4"}, "waiting", 1, "", runs)


@pytest.fixture
def lines(tmp_path, composed):
    """A function that makes a plan: the start of each line -> the rest of it."""
    run = typed(composed("n_steps=40", "data.n_validation=1024"))

    def made(grid: SweepState, jobs: int = 1) -> dict[str, str]:
        text = plan_text(grid, tmp_path / "lr", {one.name: run for one in grid.runs}, Jobs(side_by_side=jobs))
        return {line[:10].strip(): line[11:] for line in text.splitlines()}

    return made


def test_a_plan_tells_what_nobody_has_run_yet(lines):
    said = lines(design())
    assert said["varies"] == "learning_rate=1e-4,1e-3,1e-2"
    assert said["runs"].startswith("12, of 3 settings and seeds 0, 1, 2, 3; 0 ")
    assert re.match(r"4 seeds: with 1024 .* below about 0.036 to 0.076 .*by Holm over 2 comparisons", said["can show"])
    assert "two seeds" in lines(design(seeds=2))["can show"]
    looks = lines(dataclasses.replace(design(), max_seeds=4))["can show"]
    assert re.match(r"4 seeds: with 1024 .* below about 0.042 to 0.088 ", looks)  # by the level of the last look
    bare = lines(dataclasses.replace(design(), reference=None))  # compared with the first, as the report does
    assert ("learning_rate=1e-4" in bare["compared"], bare["can show"]) == (True, said["can show"])
    alone = dataclasses.replace(design(), runs=design().runs[:4])
    assert lines(alone)["can show"] == "a mean over 4 seeds with its interval"


ONE_FORMULA = "loss=reinforce_with_baseline and loss=grpo_clip and loss=grpo_no_clip are one formula"


@pytest.mark.parametrize(
    ("key", "values", "says", "cure"),
    [
        ("prompt.reward", ["r1_zero", "question_only"], "eval.reward=r1_zero", "eval.reward=r1_zero"),
        ("loss", [*ONE_ON_POLICY, "no_baseline"], ONE_FORMULA, "off_policy=e1_quarter"),
    ],
)
def test_settings_whose_runs_cannot_be_told_apart_are_said_before_they_run(tmp_path, composed, key, values, says, cure):
    """Bug: a sweep over rewards, or losses that are one on policy, is paid for, and its report compares nothing."""
    runs = [RunState(f"{key}={one},seed=0", [], {key: one}, 0) for one in values]
    for words, is_said in (((), True), ((cure,), False)):
        configs = {run.name: typed(composed(f"{key}={run.setting[key]}", *words)) for run in runs}
        text = plan_text(SweepState("x", "", [key], None, "waiting", 1, "", runs), tmp_path, configs, Jobs())
        assert (says in text) is is_said


def test_finished_runs_tell_time_disk_and_spread(tmp_path, lines):
    state = sweep(tmp_path / "lr", "learning_rate", VALUES, lambda v, s: answers(7 * s + len(v), 0.5), seeds=(0, 1, 2))
    for one in state.runs:
        one.shared_machine = one.seed == 2  # its time counts for nothing as long as there are others
        one.seconds = 600.0 if one.shared_machine else 60.0
    write_state(tmp_path / "lr", state)
    said = lines(design(), jobs=2)
    assert said["runs"].endswith("; 9 ended before")
    assert said["time"].startswith("about 90 s: 60 s a run, 2 at a time")
    assert "200 problems" in said["can show"]  # that they were asked
    (tmp_path / "lr" / "sweep.json").write_text("{")  # a damaged state is made again from the runs
    assert len(read_state(tmp_path / "lr").runs) == 9


def test_a_plan_for_elsewhere_needs_nothing_here_and_says_what_is_missing(tmp_path):
    """Neither model, data nor disk; a start with the same words is refused."""
    words = ["sweep=grpo_learning_rate", "learning_rate=1e-4,1e-3", "model=local", "model.path=/nowhere/m", "data=math"]
    words.append("data.path=/nowhere/d")
    done = rlreason("-m", *words, "dry=true", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.glob("runs/*"))) == (0, []), done.stderr
    for part in ("refused: model.path=/nowhere/m", "refused: data.path=/nowhere/d", "can show"):
        assert part in done.stdout
    with pytest.raises(ConfigError, match="is no folder"):
        checked(*words)


def test_the_subcommand_plans_memory_and_seeds_before_anything_is_downloaded(cli):
    """Bug: the plan by hand says other numbers than a sweep's, or needs the model that it is about."""
    said = cli.printed("plan", "--seeds", "4", "--problems", "1024", "--minutes", "1", "--runs", "10")
    said = " ".join(said.split())
    assert re.search(r"a difference below about 0.036 to 0.076.*10 min: 10 runs of 1 min", said)
    told = cli.figures("plan", "model=qwen2_5_math_1_5b", "data=gsm8k", "rollout=vllm", "--seeds", "4")
    assert told["memory"]["parameters"] == pytest.approx(1_543_714_304, rel=0.001)  # norms and biases are left out
    assert told["memory"]["training"]["weights"] == 4 * told["memory"]["parameters"]
    assert told["memory"]["peak"] == max(sum(told["memory"][part].values()) for part in ("training", "sampling"))
    assert (told["seeds"], told["problems"]) == (4, 1000)  # how many GSM8K has is not known before it is read
    of_run = cli.figures("plan", "data.n_validation=200", "--seeds", "2")
    assert (of_run["problems"], of_run["assumed"]) == (200, True)


@pytest.fixture
def run(composed):
    return lambda *words: typed(composed("experiment=cs336_2025", "rollout=vllm", "data.path=a/b", *words))


def test_the_published_step_gives_the_published_hours_and_tokens_grow_with_what_is_sampled_and_learned(run):
    """Bug: a unit, epochs that count as sampling, or a limit of tokens that is not read.

    200 steps of 30 to 54 s are 1.7 to 3 h, and evaluations come on top.
    """
    whole, card = run(), (int(PARAMETERS), CARDS["h100"])
    bare = altered(whole, eval_every=0, interim_eval_problems=1, eval__final_problems=1)
    low, high = hours(bare, *card)
    assert (low, high) == pytest.approx((200 * 30 / 3600, 200 * 54 / 3600), rel=0.01)
    assert hours(whole, *card)[0] > low
    for settings, factor in (
        ({"n_steps": 100}, 0.5), ({"sampling__max_tokens": 512}, 0.5), ({"epochs_per_rollout": 3}, 2.0),
        ({"rollout_batch_size": 128, "train_batch_size": 128}, 0.5),
    ):  # fmt: skip
        assert tokens_of(altered(bare, **settings)) == pytest.approx(factor * tokens_of(bare), rel=0.01)
    for words in (["algorithm=sft", "data.train=x", "epochs=2", "n_steps=null"], ["algorithm=ei"]):
        assert tokens_of(run(*words)) > 0


def test_the_hours_of_an_assignment_are_those_of_its_sweeps_on_that_card(cli, monkeypatch):
    """Bug: a card that is not here is planned with this machine's memory, or a sweep costs what one run does."""
    words = ("--gpu", "h100", "--hours", "30", "data.path=a/b")
    assert "experiment=" in cli.refused("plan", *words, "data=gsm8k", "model=olmo2_1b")
    assert "--gpu" in cli.refused("plan", "--hours", "30")
    assert "--minutes" in cli.refused("plan", "--seeds", "4", "--runs", "3")
    of_card = cli.figures("plan", "--seeds", "4", "--gpu", "l4")["memory"]["device"]
    assert of_card["total"] == CARDS["l4"].gigabytes << 30
    course, sweep = course_of("cs336_2025"), "grpo_length_normalization"
    (some,) = [question for question in course.questions if question.sweeps == [sweep]]
    monkeypatch.setattr("rlreason.report.assignment.course_of", {"cs336_2025": replace(course, questions=[some])}.get)
    told = cli.figures("plan", *words, "experiment=cs336_2025")
    (row,), hours_of_run = told["sweeps"], told["hours"]
    assert (row["sweep"], row["runs"]) == (sweep, 2)
    assert (row["low"], row["high"]) == pytest.approx((2 * hours_of_run["low"], 2 * hours_of_run["high"]))
    assert told["memory"]["device"]["total"] == CARDS["h100"].gigabytes << 30


def test_what_fits_has_the_most_seeds():
    """Bug: fewer seeds than fit, or sweeps are said to fit that do not."""
    rows = [SweepCost("a", 2, 1.0, 2.0), SweepCost("b", 3, 2.0, 3.0)]
    last = {limit: fitting_sweeps(rows, limit)[-1 if limit >= 10 else -2] for limit in (1, 3, 5, 10, 20, 99)}
    assert "seed=0,1,2,3:" in last[20]
    assert "seed=0,1:" in last[10]
    assert "seed=0:" in last[5]
    assert last[99] == last[20].replace("20 hours", "99 hours")
    assert "the first 1 of 2" in last[3]
    assert "the first 0 of 2" in last[1]
