"""Files of responses are compressed: the same lines give the same bytes, and plain ones are read alike."""

import math
from pathlib import Path

import pytest

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.files import opened, step_name
from rlreason.records.reader import RunFolder
from rlreason.records.reproduced import compared
from rlreason.records.resume import drop_later
from rlreason.records.rows import TO_LEARN, sample_of, write_rows
from rlreason.records.writer import RunWriter, rewrite_rows
from rlreason.types import Grade, Problem, Response, Sample
from tests.test_subcommands import subcommand


def sample(number: int) -> Sample:
    text = "so </think> <answer>7</answer>"
    response = Response("p", [5, 6], [1, number, 3], [-0.5, -0.25, -1.0], text, "stop")
    return Sample(response, Grade(1.0, 1.0, 1.0, "correct"), log_probs=[-0.5, -0.25, -1.0])


def run_in(folder: Path, packed: bool = True) -> Path:
    records = RunWriter(folder, "prompt: {reward: r1_zero}\nalgorithm: grpo\nseed: 0\n")
    for kind, step in ((files.ROLLOUTS, 1), (files.ROLLOUTS, 2), (files.EVALS, 2)):
        records.responses(kind, step, [sample(i) for i in range(40)], [Problem("p", "3+4?", "7")])
    for path in folder.glob("*/step_*.gz") if not packed else ():
        path.with_suffix("").write_bytes(opened(path).read())
        path.unlink()
    return folder


def test_the_same_responses_give_the_same_bytes_whenever_they_are_written(tmp_path):
    a, b = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    for path in a.glob("*/step_*"):
        assert path.read_bytes() == (b / path.relative_to(a)).read_bytes()
        assert path.stat().st_size < len(opened(path).read()) / 5


def test_plain_and_packed_runs_hold_the_same_and_every_reader_takes_both(tmp_path, capsys):
    new, old = run_in(tmp_path / "new"), run_in(tmp_path / "old", packed=False)
    one, other = RunFolder(new), RunFolder(old)
    for mine, theirs in zip(one.rollouts(), other.rollouts(), strict=True):
        assert mine[1:] == theirs[1:]
        rows = one.rows(mine, TO_LEARN)
        assert rows == other.rows(theirs, TO_LEARN)
        assert [sample_of(row) for row in rows.values()] == [sample(i) for i in range(40)]
    for folder in (new, old):
        assert subcommand("inspect", folder, "--regrade", "--write") == 0
        rows = RunFolder(folder).rows(RunFolder(folder).rollouts()[0], ())
        assert all("previous_grade" in row for row in rows.values())
    capsys.readouterr()
    assert compared(RunFolder(new), RunFolder(old))[0]["responses"]
    for folder in (new, old):
        drop_later(folder, {"step": 1, "lines": {}, "parts": {"validation": []}})  # as resuming does
        assert [file.step for file in RunFolder(folder).rollouts()] == [1]
        assert not list((folder / "evals").iterdir())


def test_a_packed_file_that_was_cut_is_said_and_read_as_far_as_it_goes(tmp_path):
    run_in(tmp_path)
    said = list[str]()
    folder = RunFolder(tmp_path, said.append)
    file = folder.rollouts()[0]
    whole, content = folder.rows(file, ()), file.path.read_bytes()
    file.path.write_bytes(content[: int(0.9 * len(content))])
    rows = folder.rows(file, ())
    assert list(rows.items()) == list(whole.items())[: len(rows)]
    assert len(rows) < len(whole)
    assert said[0].startswith(f"{file.path}: left out line ")
    before = file.path.read_bytes()
    with pytest.raises(ConfigError, match="is damaged"):
        rewrite_rows(file.path, {1: {}})
    assert file.path.read_bytes() == before


def test_numbers_that_are_not_finite_are_null_in_either_kind(tmp_path):
    for name in ("a.jsonl", f"{step_name(1)}"):
        write_rows(tmp_path / name, [{"a": [1.0, math.nan]}, {"b": 2}])
        assert opened(tmp_path / name).read() == b'{"a": [1.0, null]}\n{"b": 2}\n'
