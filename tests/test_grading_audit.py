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


def regrade(run: Path | str, *words: str) -> int:
    return subcommand("inspect", run, "--regrade", *words)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "prompt: {reward: r1_zero}\ngrading: {extract: strict, timeout_s: 3.0, other: 1}\n"
    )
    for step, cases in (("00001", CASES[:2]), ("00012", CASES[2:])):
        rows = [
            {
                "problem_id": f"p{index}",
                "response": response,
                "gold": gold,
                "reward": reward,
                "extra": [1, "ü"],
            }
            | {"format_reward": 1.0, "answer_reward": reward, "outcome": "correct" if reward else "wrong"}
            for index, (response, gold, reward) in enumerate(cases)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"step_{step}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def saved(run: Path) -> list[dict]:
    paths = sorted((run / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_counts_and_shows_the_disagreements_and_leaves_the_files_alone(run, capsys):
    before = saved(run)
    assert regrade(run, "--other", "own_reward:all_right") == 0
    printed = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "%" in line}
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
    (empty := tmp_path / "empty").mkdir()
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.yaml").write_text("prompt: {reward: r1_zero}\n")
    (odd := tmp_path / "odd").mkdir()
    (odd / "config.yaml").write_text("model: x\n")
    for folder, word in [
        ("nowhere", "no folder"),
        (empty, "no config.yaml"),
        (bare, "no rollouts"),
        (odd, "prompt.reward"),
    ]:
        assert regrade(folder) == 2
        said = capsys.readouterr().err
        assert word in said
        assert said.count("\n") == 1
    for path in (run / "rollouts").iterdir():
        path.write_text('{"response": "38", "gold": "38"}\n')
    assert regrade(run) == 3
    assert f"{run / 'rollouts'} " in capsys.readouterr().err


def test_write_leaves_what_is_no_rollout_as_it_is(run, capsys):
    path = run / "rollouts/step_00001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    text = json.dumps(json.loads(first) | {"response": "two \u2028 lines"}, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(text + b'{"broken\n\0\0\n' + second + b'{"half')
    for _ in range(2):
        assert regrade(run, "--write") == 0
        left = "left out line 2 (not JSON), 3 (NUL bytes), 5 (half a line)"
        assert capsys.readouterr().err == f"rlreason: {path}: {left}\n"
        lines = path.read_bytes().split(b"\n")
        assert (lines[1:3], lines[4]) == ([b'{"broken', b"\0\0"], b'{"half')
        assert [json.loads(lines[k])["outcome"] for k in (0, 3)] == ["unformatted", "correct"]


COUNTDOWN_ROWS = [  # response, outcome as saved; the gold is 3 5 7 -> 22
    ("</think> <answer>7 + 3 * 5</answer>", "correct"),
    ("</think> <answer>22</answer>", "wrong"),
    ("</think> <answer>3 * 5 + 7 = 22</answer>", "correct"),  # the saved outcome is wrong
    ("22", "unformatted"),
]


def write_run(folder: Path, config: str, rows: list[tuple[str, str, str, float]]) -> Path:
    """A run whose rollouts are (response, gold, outcome, answer reward)."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    names = ("response", "gold", "outcome", "answer_reward")
    lines = [json.dumps(dict(zip(names, row, strict=True)) | {"reward": row[-1]}) for row in rows]
    (folder / "rollouts/step_00001.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def table_of(printed: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "%" in line}


def test_data_with_a_verifier_is_audited_by_it(tmp_path, capsys):
    config = "data: {verifier: rlreason.grading.verifiers.countdown}\nprompt: {reward: r1_zero}\ngrading: {}\n"
    rows = [(response, "3 5 7 -> 22", outcome, float(outcome == "correct")) for response, outcome in COUNTDOWN_ROWS]
    assert regrade(write_run(tmp_path / "run", config, rows), "--write") == 0
    printed = capsys.readouterr().out
    assert table_of(printed) == {
        "saved": ["50.0%", "75.0%", "1", "0"],
        "now": ["25.0%", "100.0%", "0", "0"],
    }
    assert "math-verify is left out" in printed
    assert [row["outcome"] for row in saved(tmp_path / "run")] == ["correct", "wrong", "wrong", "unformatted"]


def test_partial_credit_is_no_right_answer_and_the_runs_own_threshold_holds(tmp_path, capsys):
    reward = "prompt: {reward: 'own_reward:partial_credit'}\ndata: {verifier: unused}\n"
    rows = [("38", "38", "correct", 1.0), ("39", "38", "wrong", 0.1)]
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
    rows = [("38", "38", "correct", 1.0)]
    run = write_run(tmp_path / "run", f"prompt: {{reward: '{gone}'}}\n", rows)
    before = saved(run)
    assert regrade(run, "--write") == 2
    said = capsys.readouterr().err
    assert f"rlreason: {gone}: " in said
    assert cure in " ".join(said.split())
    assert saved(run) == before
