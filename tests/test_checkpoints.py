"""Checkpoints as files: whole or absent, checked before they are trusted, the best of them kept."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.files import (
    checkpoint_fault,
    checkpoints_in,
    linked,
    moments_in,
    name_of,
    newest_good,
    remove,
    remove_moments,
    write_checkpoint,
)
from rlreason.records.resume import drop_behind, drop_later
from rlreason.training.checkpoint import read_tensors


def write_some(folder: Path) -> None:
    """The large files of a small checkpoint."""
    (folder / "model").mkdir()
    save_file({"w": torch.arange(6.0)}, folder / "model/model.safetensors")
    save_file({"generator.cpu": torch.get_rng_state()}, folder / "state.safetensors")


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
    (line,) = said
    assert line.startswith(f"! {newest} cannot be used")
    DAMAGE[damage](second / file)
    assert newest_good(tmp_path, said.append) == first
    DAMAGE[damage](first / file)
    with pytest.raises(ConfigError, match="checkpoints/"):
        newest_good(tmp_path, said.append)


def test_a_damaged_checkpoint_does_not_stand_in_for_the_one_that_the_run_writes_there_again(tmp_path):
    """A run that goes on from further back comes to the same place once more, and needs a good one there."""
    *_, newest = three_in(tmp_path)
    flipped(newest / "state.json")
    taken = newest_good(tmp_path, print)
    assert taken is not None
    drop_behind(taken)
    assert checkpoints_in(tmp_path)[-1] == taken
    again = write_checkpoint(tmp_path, newest.name, {"step": 3, "lines": {}}, write_some)
    assert newest_good(tmp_path, print) == again


def test_checkpoints_are_in_the_order_in_which_they_were_written_however_many_steps_there_are(tmp_path):
    places = [(1, 9, 1), (9, 10, 1), (99_999, 99_999, 2), (99_999, 100_000, 2), (100_000, 100_001, 3)]
    for place in reversed(places):
        (tmp_path / "checkpoints" / name_of(*place)).mkdir(parents=True)
    assert [path.name for path in checkpoints_in(tmp_path)] == [name_of(*place) for place in places]


def test_a_checkpoint_that_fails_leaves_nothing_and_those_before_as_they_were(tmp_path):
    *_, newest = three_in(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fails(folder: Path) -> None:
        write_some(folder)
        raise OSError(28, "No space left on device")

    for name, write, code in ((name_of(4, 8, 4), fails, 4), (newest.name, write_some, 2)):  # a full disk, a taken name
        with pytest.raises(UnwritableError, match="cannot be written") as full:
            write_checkpoint(tmp_path, name, {"step": 9, "lines": {}}, write)
        assert full.value.exit_code == code
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_linked_model_folder_is_the_same_bytes_and_outlives_its_source(tmp_path):
    source = three_in(tmp_path)[0] / "model"
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    linked(source, target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert (target / "model.safetensors").stat().st_ino == (source / "model.safetensors").stat().st_ino
    remove(source.parent)
    assert load_file(target / "model.safetensors")["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_records_behind_a_checkpoint_are_cut_off_wherever_a_line_ends(tmp_path):
    one, *others = ('{"train_step": 1}\n', '{"train_step": 2}\n', '{"train_step": 3}\n', '{"train_step": ')
    (tmp_path / "metrics.jsonl").write_text(one + "".join(others))
    (tmp_path / "grading_incidents.jsonl").write_text("{}\n{}\n")  # there was none at the checkpoint
    for name in ("rollouts/step_00001", "rollouts/step_00002", "evals/step_00000", "evals/step_00001_update_00002"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl.gz").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "checkpoints/step_00009.partial/model").mkdir(parents=True)
    cut_off = drop_later(tmp_path, {"step": 1, "lines": {"metrics.jsonl": 1}, "parts": {"validation": [{"step": 0}]}})
    assert (tmp_path / "metrics.jsonl").read_text() == one
    assert not (tmp_path / "grading_incidents.jsonl").read_bytes()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step_*"))
    assert left == ["evals/step_00000.jsonl.gz", "rollouts/step_00001.jsonl.gz"]
    assert not (tmp_path / "model").exists()
    assert cut_off == 3


def test_a_checkpoint_is_whole_without_its_moments(tmp_path):
    def write(folder: Path) -> None:
        write_some(folder)
        (folder / "moments.safetensors").write_bytes(b"123")

    path = write_checkpoint(tmp_path, name_of(1, 1, 1), {"step": 1, "lines": {}}, write)
    assert moments_in(path) == 3
    remove_moments(path)
    assert checkpoint_fault(path) == ""
    assert not moments_in(path)
    assert {file.name for file in path.iterdir()} == {"model", "state.safetensors", "state.json", "manifest.json"}
    assert read_tensors(path).keys() == {"generator.cpu"}
