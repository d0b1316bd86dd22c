"""Checkpoints as files: whole or absent, checked before they are trusted, the best of them kept."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.files import checkpoints_in, name_of, newest_good, write_checkpoint
from rlreason.records.resume import drop_behind, drop_later


def write_some(folder: Path) -> None:
    """The large files of a small checkpoint."""
    (folder / "model").mkdir()
    for name in ("model/model.safetensors", "state.safetensors"):
        save_file({"w": torch.arange(6.0)}, folder / name)


def three_in(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_checkpoint(folder, name_of(i, 2 * i, i), {"step": i, "lines": {}}, write_some) for i in (1, 2, 3)]


def flipped(path: Path) -> None:
    """One bit of one byte in the middle, the size as it was."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flipped, "half a file": lambda path: os.truncate(path, path.stat().st_size // 2),
    "no file": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("file", ["model/model.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_left_out_and_where_none_can_be_used_nothing_is_begun_anew(tmp_path, file, damage):
    first, second, newest = three_in(tmp_path)
    shutil.copytree(newest, newest.with_name(f"{name_of(4, 8, 4)}.partial"))  # one that is half written is never taken
    said: list[str] = []
    assert newest_good(tmp_path, said.append) == newest
    DAMAGE[damage](newest / file)
    assert newest_good(tmp_path, said.append) == second
    assert [line.startswith(f"! {newest} cannot be used") for line in said] == [True]
    for path in (first, second):
        DAMAGE[damage](path / file)
    with pytest.raises(ConfigError, match="checkpoints/"):
        newest_good(tmp_path, said.append)


def test_a_damaged_checkpoint_does_not_stand_in_for_the_one_that_the_run_writes_there_again(tmp_path):
    """A run that goes on from further back comes to the same place once more, and needs a good one there."""
    *_, newest = three_in(tmp_path)
    flipped(newest / "state.json")
    drop_behind(checkpoints_in(tmp_path)[-2])
    assert len(checkpoints_in(tmp_path)) == 2
    again = write_checkpoint(tmp_path, newest.name, {"step": 3, "lines": {}}, write_some)
    assert newest_good(tmp_path, print) == again
    write_checkpoint(tmp_path, name_of(99_999, 99_999, 4), {"step": 4, "lines": {}}, write_some)
    last = write_checkpoint(tmp_path, name_of(99_999, 100_000, 4), {"step": 4, "lines": {}}, write_some)
    assert checkpoints_in(tmp_path)[-1] == last  # of more digits


def test_a_checkpoint_that_fails_leaves_nothing_and_those_before_as_they_were(tmp_path):
    *_, newest = three_in(tmp_path)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    fails = Mock(side_effect=OSError(28, "No space left on device"))
    for name, write, code in ((name_of(4, 8, 4), fails, 4), (newest.name, write_some, 2)):  # a full disk, a taken name
        with pytest.raises(UnwritableError, match="cannot be written") as full:
            write_checkpoint(tmp_path, name, {"step": 9, "lines": {}}, write)
        assert full.value.exit_code == code
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_records_behind_a_checkpoint_are_cut_off_wherever_a_line_ends(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"train_step": 1}\n{"train_step": 2}\n{"train_step": 3}\n{"train_step": ')
    (tmp_path / "grading_incidents.jsonl").write_text("{}\n{}\n")  # there was none at the checkpoint
    for name in ("rollouts/step_00001", "rollouts/step_00002", "evals/step_00000", "evals/step_00001_update_00002"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl.gz").write_text("{}\n")
    (tmp_path / "model").mkdir()
    cut_off = drop_later(tmp_path, {"step": 1, "lines": {"metrics.jsonl": 1}, "parts": {"validation": [{"step": 0}]}})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"train_step": 1}\n'
    assert not (tmp_path / "grading_incidents.jsonl").read_bytes()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step_*"))
    assert left == ["evals/step_00000.jsonl.gz", "rollouts/step_00001.jsonl.gz"]
    assert (cut_off, (tmp_path / "model").exists()) == (3, False)
