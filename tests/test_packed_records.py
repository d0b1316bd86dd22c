"""Files of responses are compressed: the same lines give the same bytes."""

import math
from pathlib import Path

import pytest

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.files import opened, step_name
from rlreason.records.reader import RunFolder, compared
from rlreason.records.resume import drop_later
from rlreason.records.rows import TO_LEARN, sample_of, write_rows
from rlreason.records.writer import RunWriter
from rlreason.types import Grade, Problem, Response, Sample
from tests.test_subcommands import subcommand

PROBLEM = Problem("p", "3+4?", "7")


def sample(number: int, text: str = "so </think> <answer>7</answer>") -> Sample:
    response = Response("p", [5, 6], [1, number, 3], [-0.5, -0.25, -1.0], text, "stop")
    return Sample(response, Grade(1.0, 1.0, 1.0, "correct"), log_probs=[-0.5, -0.25, -1.0])


def run_in(folder: Path) -> Path:
    records = RunWriter(folder, "prompt: {reward: r1_zero}\nalgorithm: grpo\nseed: 0\n")
    for kind, step in ((files.ROLLOUTS, 1), (files.ROLLOUTS, 2), (files.EVALS, 2)):
        records.responses(kind, step, [sample(i) for i in range(40)], [PROBLEM])
    return folder


def test_the_same_responses_give_the_same_bytes_whenever_they_are_written(tmp_path):
    a, b = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    for path in a.glob("*/step_*"):
        assert path.read_bytes() == (b / path.relative_to(a)).read_bytes()
        assert path.stat().st_size < len(opened(path).read()) / 5


def test_responses_are_read_as_written_and_graded_again_in_place(tmp_path):
    folder, other = RunFolder(run_in(tmp_path / "a")), RunFolder(run_in(tmp_path / "b"))
    rows = folder.rows(folder.rollouts()[0], TO_LEARN)
    assert [sample_of(row) for row in rows.values()] == [sample(i) for i in range(40)]
    assert compared(folder, other)[0]["responses"]
    assert subcommand("inspect", folder.path, "--regrade", "--write") == 0
    assert all("previous_grade" in row for row in folder.rows(folder.rollouts()[0], ()).values())
    assert not compared(folder, other)[0]["responses"]


def test_resuming_cuts_files_of_later_steps_away(tmp_path):
    folder = run_in(tmp_path)
    drop_later(folder, {"step": 1, "lines": {}, "parts": {"validation": []}})
    assert [file.step for file in RunFolder(folder).rollouts()] == [1]
    assert not list((folder / "evals").iterdir())


def test_a_packed_file_that_was_cut_is_refused(tmp_path):
    folder = RunFolder(run_in(tmp_path))
    file = folder.rollouts()[0]
    file.path.write_bytes(file.path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=f"^{file.path} cannot be read"):
        folder.rows(file, ())


def test_numbers_that_are_not_finite_are_null_in_either_kind(tmp_path):
    for name in ("a.jsonl", f"{step_name(1)}"):
        write_rows(tmp_path / name, [{"a": [1.0, math.nan]}, {"b": 2}])
        assert opened(tmp_path / name).read() == b'{"a": [1.0, null]}\n{"b": 2}\n'
