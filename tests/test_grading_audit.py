"""The audit command on a small run folder: what it finds, what it writes, and how it answers mistakes."""

import json
from pathlib import Path

import pytest

from tests.test_subcommands import subcommand

CASES = [  # response, gold, reward as saved
    ("</think> <answer>38</answer>", "38", 1.0),
    ("</think> <answer>0.5</answer>", r"\frac12", 0.0),  # the saved reward is wrong
    ("</think> <answer>9 am</answer>", "9 pm", 1.0),  # and here
    ("no tags", "38", 0.0),
    (r"</think> <answer>\int_0^1 x\,dx</answer>", "0.5", 1.0),
]


def regrade(run: Path, *words: str) -> int:
    return subcommand("inspect", run, "--regrade", *words)


def row_of(response: str, gold: str, reward: float, outcome: str | None = None) -> dict:
    """A row of rollouts as it was saved."""
    grade = {"reward": reward, "answer_reward": reward, "outcome": outcome or ("correct" if reward else "wrong")}
    return {"response": response, "gold": gold, "extra": [1, "ü"]} | grade


def write_run(folder: Path, config: str, *steps: list[dict]) -> Path:
    """A run with such rollouts."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    for step, rows in enumerate(steps, 1):
        (folder / f"rollouts/step_{step:05}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = "prompt: {reward: r1_zero}\ngrading: {extract: strict, timeout_s: 3.0, other: 1}\n"
    rows = [row_of(*case) for case in CASES]
    return write_run(tmp_path / "run", config, rows[:2], rows[2:])


def table_of(printed: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "%" in line}


def saved(run: Path) -> list[dict]:
    paths = sorted((run / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_counts_and_shows_the_disagreements_and_leaves_the_files_alone(run, capsys):
    before = saved(run)
    assert regrade(run, "--other", "own_reward:all_right") == 0
    printed = capsys.readouterr().out
    table = table_of(printed)
    assert table["saved"] == ["60.0%", "60.0%", "1", "1"]
    assert table["now"] == ["60.0%", "100.0%", "0", "0"]
    assert table["math-verify"][2:] == ["1", "0"]  # it takes 9 am for 9 pm
    assert table["own_reward:all_right"] == ["100.0%", "60.0%", "2", "0"]
    assert "wrong only for saved" in printed
    assert "ground truth '9 pm'" in printed
    assert saved(run) == before


def test_write_grades_again_and_keeps_the_first_grade(run, capsys):
    for _ in range(2):
        assert regrade(run, "--write") == 0
        rows = saved(run)
        assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0, 1.0]
        assert [row["outcome"] for row in rows] == ["correct", "correct", "wrong", "unformatted", "correct"]
        assert [row["previous_grade"]["reward"] for row in rows] == [reward for *_, reward in CASES]
        assert all(row["extra"] == [1, "ü"] for row in rows)
    assert len(list((run / "rollouts").iterdir())) == 2
    assert "previous_grade" in capsys.readouterr().out


def test_the_command_answers_mistakes_in_one_line(tmp_path, run, capsys):
    for name, config, word in [
        ("nowhere", None, "no folder"),
        ("empty", "", "no config.yaml"),
        ("bare", "prompt: {reward: r1_zero}\n", "no rollouts"),
        ("odd", "model: x\n", "prompt.reward"),
    ]:
        if config is not None:
            (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.yaml").write_text(config)
        assert regrade(tmp_path / name) == 2
        said = capsys.readouterr().err
        assert word in said
        assert said.count("\n") == 1
    for path in (run / "rollouts").iterdir():
        path.write_text('{"response": "38", "gold": "38"}\n')
    assert regrade(run) == 3
    assert f"{run / 'rollouts'} " in capsys.readouterr().err


COUNTDOWN = "data: {verifier: rlreason.grading.verifiers.countdown}\nprompt: {reward: r1_zero}\ngrading: {}\n"
COUNTDOWN_ROWS = [  # the saved outcome of the third is wrong
    row_of("</think> <answer>7 + 3 * 5</answer>", "3 5 7 -> 22", 1.0),
    row_of("</think> <answer>22</answer>", "3 5 7 -> 22", 0.0),
    row_of("</think> <answer>3 * 5 + 7 = 22</answer>", "3 5 7 -> 22", 1.0),
    row_of("22", "3 5 7 -> 22", 0.0, "unformatted"),
]


def test_write_leaves_what_is_no_rollout_as_it_is(tmp_path, capsys):
    run = write_run(tmp_path / "run", COUNTDOWN, COUNTDOWN_ROWS[:2])
    path = run / "rollouts/step_00001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    text = json.dumps(json.loads(second) | {"response": "two \u2028 lines"}, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(text + b'{"broken\n\0\0\n' + first + b'{"half')
    for _ in range(2):
        assert regrade(run, "--write") == 0
        left = "left out line 2 (not JSON), 3 (NUL bytes), 5 (half a line)"
        assert capsys.readouterr().err == f"rlreason: {path}: {left}\n"
        lines = path.read_bytes().split(b"\n")
        assert (lines[1:3], lines[4]) == ([b'{"broken', b"\0\0"], b'{"half')
        assert [json.loads(lines[k])["outcome"] for k in (0, 3)] == ["unformatted", "correct"]


def test_data_with_a_verifier_is_audited_by_it(tmp_path, capsys):
    assert regrade(write_run(tmp_path / "run", COUNTDOWN, COUNTDOWN_ROWS), "--write") == 0
    printed = capsys.readouterr().out
    assert table_of(printed) == {"saved": ["50.0%", "75.0%", "1", "0"], "now": ["25.0%", "100.0%", "0", "0"]}
    assert "math-verify is left out" in printed
    assert [row["outcome"] for row in saved(tmp_path / "run")] == ["correct", "wrong", "wrong", "unformatted"]


def test_partial_credit_is_no_right_answer_and_the_runs_own_threshold_holds(tmp_path, capsys):
    reward = "prompt: {reward: 'own_reward:partial_credit'}\ndata: {verifier: unused}\n"
    rows = [row_of("38", "38", 1.0), row_of("39", "38", 0.1, "wrong")]
    for name, grading, share in (("whole", "{}", "50.0%"), ("tenth", "{correct_at: 0.1}", "100.0%")):
        run = write_run(tmp_path / name, f"{reward}grading: {grading}\n", rows)
        assert regrade(run) == 0
        table = table_of(capsys.readouterr().out)
        assert (table["saved"][0], table["now"][0]) == ("50.0%", share)


@pytest.mark.parametrize(
    ("gone", "cure"),
    [("no.such:reward", "there is no module no in"), ("python:f-12345678", "give Grader(reward=FUNCTION)")],
)
def test_a_reward_that_cannot_be_had_overwrites_no_grades(gone, cure, tmp_path, capsys):
    run = write_run(tmp_path / "run", f"prompt: {{reward: '{gone}'}}\n", [row_of("38", "38", 1.0)])
    before = saved(run)
    assert regrade(run, "--write") == 2
    said = capsys.readouterr().err
    assert f"rlreason: {gone}: " in said
    assert cure in " ".join(said.split())
    assert saved(run) == before
