"""Checkpoints as files: whole or absent, checked before they are trusted, the best of them kept."""

import os
from collections.abc import Callable
from itertools import permutations
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
    pruned,
    read_state,
    remove,
    remove_moments,
    set_aside_behind,
    write_checkpoint,
)
from rlreason.records.resume import checkpoint_to_resume, drop_later
from rlreason.training.checkpoint import read_tensors


def write_some(folder: Path) -> None:
    """The large files of a small checkpoint, moments of one process and of ranks among them."""
    for name in ("model", "moments"):
        (folder / name).mkdir()
    save_file({"w": torch.arange(6.0)}, folder / "model/model.safetensors")
    save_file({"generator.cpu": torch.get_rng_state()}, folder / "state.safetensors")
    (folder / "moments/__0_0.distcp").write_bytes(b"12345")
    (folder / "moments.safetensors").write_bytes(b"123")


def three_in(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_checkpoint(folder, name_of(i, 2 * i, i), {"step": i, "lines": {}}, write_some) for i in (1, 2, 3)]


def flipped(path: Path) -> None:
    """One bit of one byte in the middle, the size as it was."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: list[Callable[[Path], object]] = [flipped, lambda path: os.truncate(path, 0), Path.unlink]


@pytest.mark.parametrize("file", ["model/model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE, ids=["a flipped bit", "an empty file", "no file"])
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_is_taken(tmp_path, file, damage):
    _, second, newest = three_in(tmp_path)
    said: list[str] = []
    assert newest_good(tmp_path, said.append) == newest
    damage(newest / file)
    assert newest_good(tmp_path, said.append) == second
    assert len(said) == 1
    assert str(newest) in said[0]
    set_aside_behind(second)  # a run that goes on from there comes to the same place once more
    assert checkpoints_in(tmp_path)[-1] == second
    again = write_checkpoint(tmp_path, newest.name, {"step": 3, "lines": {}}, write_some)
    assert newest_good(tmp_path, print) == again


def test_where_no_checkpoint_can_be_used_nothing_is_begun_anew_in_silence(tmp_path):
    for path in three_in(tmp_path):
        flipped(path / "state.safetensors")
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(ConfigError, match=r"checkpoints/"):
            newest_good(tmp_path, lambda line: None)


def test_checkpoints_are_in_the_order_in_which_they_were_written_and_half_written_ones_are_none(tmp_path):
    places = [(1, 9, 1), (9, 10, 1), (99_999, 99_999, 2), (99_999, 100_000, 2), (100_000, 100_001, 3)]
    for place in reversed(places):
        (tmp_path / "checkpoints" / name_of(*place)).mkdir(parents=True)
    (tmp_path / "checkpoints" / f"{name_of(100_001, 1, 1)}.partial").mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == [name_of(*place) for place in places]


def test_the_newest_and_the_best_stay():
    names = list("abcdef")
    assert pruned(names, {}, 2) == list("abcd")
    assert pruned(names, {"b": 0.5, "d": 0.5}, 1) == list("abce")  # of equal ones the newest
    for order in permutations((0.1, 0.2, 0.3)):
        gone = pruned(names, dict(zip("abc", order, strict=True)), 1)
        assert set(names) - set(gone) == {"f", "abc"[order.index(0.3)]}


def test_a_checkpoint_that_fails_leaves_nothing_and_those_before_as_they_were(tmp_path):
    *_, newest = three_in(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fails(folder: Path) -> None:
        write_some(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(UnwritableError, match="No space left on device") as full:
        write_checkpoint(tmp_path, name_of(4, 8, 4), {}, fails)
    assert full.value.exit_code == 4
    with pytest.raises(UnwritableError, match=r"step_00003\S* cannot be written"):  # where the rename fails
        write_checkpoint(tmp_path, newest.name, {"step": 9, "lines": {}}, write_some)
    assert read_state(newest)["step"] == 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_linked_model_folder_is_the_same_bytes_and_outlives_its_source(tmp_path):
    source, target = three_in(tmp_path)[0] / "model", tmp_path / "model"
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
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "checkpoints/step_00009.partial/model").mkdir(parents=True)
    state = {"step": 1, "lines": {"metrics.jsonl": 1}, "parts": {"validation": [{"step": 0}]}}
    assert drop_later(tmp_path, state) == 3
    assert (tmp_path / "metrics.jsonl").read_text() == one
    incidents = tmp_path / "grading_incidents.jsonl"
    assert not incidents.exists() or incidents.read_text() == ""
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step_*"))
    assert left == ["evals/step_00000.jsonl", "rollouts/step_00001.jsonl"]
    assert not (tmp_path / "model").exists()


def test_records_that_are_shorter_than_at_a_checkpoint_leave_it_out(tmp_path):
    """The rows that belong in between are lost."""
    for step in (1, 2):
        (tmp_path / "metrics.jsonl").write_text("{}\n" * step)
        state = {"step": step, "lines": {"metrics.jsonl": step}, "parts": {"validation": []}}
        write_checkpoint(tmp_path, name_of(step, step, step), state, write_some)
    first, second = checkpoints_in(tmp_path)
    said: list[str] = []
    assert newest_good(tmp_path, said.append) == second
    (tmp_path / "metrics.jsonl").write_text("{}\n{")
    assert newest_good(tmp_path, said.append) == first
    assert "had 2 lines then and has 1" in said[0]
    drop_later(tmp_path, state)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    (tmp_path / "metrics.jsonl").unlink()
    assert newest_good(tmp_path, said.append) == second  # no checkpoint has them: the newest is as good as any


def test_a_checkpoint_is_whole_without_its_moments_and_of_a_finished_run_that_is_said(tmp_path):
    settings = "algorithm: grpo\nseed: 0\nn_steps: 4\n"
    state = {"step": 4, "lines": {}, "config": settings, "parts": {"counters": {"train_step": 4}}}
    path = write_checkpoint(tmp_path, name_of(4, 4, 1), state, write_some)
    assert sum(moments_in(path).values()) == 8
    remove_moments(path)
    assert checkpoint_fault(path) == ""
    assert not moments_in(path)
    assert {file.name for file in path.iterdir()} == {"model", "state.safetensors", "state.json", "manifest.json"}
    assert read_tensors(path).keys() == {"generator.cpu"}
    (tmp_path / "config.yaml").write_text(settings)
    said: list[str] = []
    assert checkpoint_to_resume(tmp_path, settings, said.append) == path
    assert not said
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    checkpoint_to_resume(tmp_path, settings.replace("n_steps: 4", "n_steps: 8"), said.append)
    assert "checkpoint.keep_final" in said[0]
