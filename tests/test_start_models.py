"""Start models are made once and kept: found bit by bit, made anew when broken, by one run at a time."""

import io
import json
import multiprocessing
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from test_warm_start import equal, weights

from rlreason.config.run import RunConfig
from rlreason.data.prepare import read_splits
from rlreason.health.watch import Monitors
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.records.reader import without_clock
from rlreason.records.writer import RunWriter
from rlreason.training import warm_start as starts
from rlreason.training.build import build_components, lessons_of, make_policy, teach_habits
from rlreason.training.train import train
from rlreason.training.warm_start import (
    SHIPPED,
    StartWeights,
    cache_folder,
    cached,
    checksum,
    find_shipped,
    hashed,
    maker_of,
    recipe_of,
)
from tests.run_settings import settings
from tests.waiting import MINUTES, wait_for
from tools.start_model import make, settings_from, ship

QUICK = ["model.width=32", "model.warm_start.steps=2", "model.warm_start.batch_size=8", "data.n_train=64"]
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16)}
FORK = multiprocessing.get_context("fork")


def begun(run) -> tuple[Policy, StartWeights, str]:
    """(policy with its habits, where they came from, what was said)."""
    lessons, out = read_splits(run.data, print)[0], io.StringIO()
    policy = make_policy(run, lessons)
    start = teach_habits(run, policy, lessons, Console(out=out))
    return policy, start, out.getvalue()


# --- The folder that keeps them ---


def test_weights_are_read_back_bit_by_bit(tmp_path):
    said: list[str] = []
    assert [cached(tmp_path, "k", lambda: WEIGHTS, said.append)[1] for _ in range(2)] == [False, True]
    back, _ = cached(tmp_path, "k", dict, said.append)
    assert checksum(back) == checksum(WEIGHTS)
    assert all(back[name].dtype == value.dtype for name, value in WEIGHTS.items())
    assert [p.name for p in tmp_path.glob("k.*") if p.suffix != ".lock"] == ["k.safetensors"]
    assert said == []


def test_the_checksum_sees_one_bit_the_sign_of_zero_and_a_name():
    changed = [WEIGHTS | {"a": WEIGHTS["a"].nextafter(torch.tensor(9.0))}, WEIGHTS | {"b": WEIGHTS["b"].abs()}]
    changed += [{"c": WEIGHTS["a"], "b": WEIGHTS["b"]}, WEIGHTS | {"a": WEIGHTS["a"].T.contiguous()}]
    assert len({checksum(one) for one in (WEIGHTS, *changed)}) == 5


def make_slowly(folder: Path, mark: Path) -> None:
    """Make the weights once the test says so."""

    def make() -> dict[str, torch.Tensor]:
        with mark.open("a") as file:
            file.write("made\n")
        wait_for(mark.with_suffix(".go").exists)
        return WEIGHTS

    assert checksum(cached(folder, "k", make, print)[0]) == checksum(WEIGHTS)


def test_two_runs_that_ask_at_once_make_it_once_and_a_killed_one_blocks_nobody(tmp_path):
    mark = tmp_path / "mark"
    killed, *both = (FORK.Process(target=make_slowly, args=(tmp_path / "cache", mark)) for _ in range(3))
    killed.start()
    wait_for(mark.exists)
    killed.kill()
    killed.join(MINUTES)
    for process in both:
        process.start()
    wait_for(lambda: mark.read_text() == "made\n" * 2)
    mark.with_suffix(".go").touch()
    for process in both:
        process.join(MINUTES)
    assert [process.exitcode for process in both] == [0, 0]
    assert mark.read_text() == "made\n" * 2
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_folder_that_cannot_be_written_is_one_line_and_no_more():
    said: list[str] = []
    found, was_there = cached(Path("/dev/null/cache"), "k", lambda: WEIGHTS, said.append)
    assert (checksum(found), was_there, len(said)) == (checksum(WEIGHTS), False, 1)
    assert "/dev/null/cache cannot be written" in said[0]


def test_the_folder_is_the_users_cache_or_the_one_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "rlreason"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / ".cache" / "rlreason"
    assert cache_folder("~/mine") == tmp_path / "mine"


# --- What a key is made of ---


def recipe_for(run) -> tuple[dict, Policy]:
    """(the recipe of a run's start model, its policy without habits)."""
    lessons = read_splits(run.data, print)[0]
    policy = make_policy(run, lessons)
    return recipe_of(run.model, policy, lessons_of(run, run.model, lessons)), policy


def key_of(run) -> tuple[str, str]:
    """(of the recipe, of what makes it)."""
    recipe, policy = recipe_for(run)
    return hashed(recipe), hashed(maker_of(run.model, policy))


@pytest.fixture(scope="module")
def quick():
    """The settings of a small run, and their key."""
    run = settings(*QUICK)
    return run, key_of(run)


def changed(run, key: str, value) -> RunConfig:
    """The settings with one of them changed."""
    other = node = deepcopy(run)
    *groups, name = key.split(".")
    for group in groups:
        node = getattr(node, group)
    assert getattr(node, name) != value
    setattr(node, name, value)
    return other


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.width", 64), ("model.seed", 1), ("model.weights", "bfloat16"),
        ("model.dtype", "bfloat16"), ("model.warm_start.steps", 3),
        ("model.warm_start.hasty_share", 0.5), ("data.max_value", 19), ("data.n_train", 65),
        ("prompt.file", "r1_zero.prompt"), ("prompt.trace", "so {solution} </think> <answer>{answer}</answer>"),
    ],
)  # fmt: skip
def test_whatever_changes_the_model_changes_its_key(quick, key, value):
    run, before = quick
    assert key_of(changed(run, key, value))[0] != before[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1), ("micro_batch_tokens", 4096), ("data.n_validation", 9), ("data.limit", 9), ("learning_rate", 1e-5),
        ("model.freeze", ["norm"]), ("model.gradient_checkpointing", True),
        ("model.cache", "x"), ("model.dtype", "float32"), ("model.check_memory", False),
    ],
)  # fmt: skip
def test_what_does_not_change_the_model_leaves_its_key(quick, key, value):
    run, before = quick
    assert key_of(changed(run, key, value)) == before


def test_the_algorithms_start_from_one_model(quick):
    for algorithm in ("sft", "ei", "evaluate"):
        assert key_of(settings(*QUICK, f"algorithm={algorithm}")) == quick[1]


def test_every_setting_of_the_model_is_in_the_key_or_said_not_to_be(quick):
    run, _ = quick
    assert {f.name for f in fields(run.model)} <= {*recipe_for(run)[0], *starts.ROUNDING, *starts.AFTERWARDS}


def test_the_model_is_the_same_with_any_number_of_threads():
    """Else a run goes on with another start model, and is refused."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(begun(settings(*QUICK, "model.cache=null")))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
    assert equal(found[0][0], found[1][0])
    assert found[0][1].key == found[1][1].key


# --- Runs ---


def test_what_is_found_is_what_would_be_made(tmp_path):
    kept = [*QUICK, f"model.cache={tmp_path}"]
    words = ([*QUICK, "model.cache=null"], kept, [*kept, "seed=7"], [*kept, "model.seed=1"])
    alone, first, second, other = (begun(settings(*one)) for one in words)
    assert [one[1].source for one in (alone, first, second, other)] == ["made", "made", "cache", "made"]
    assert equal(alone[0], first[0])
    assert equal(alone[0], second[0])
    assert alone[1].weights == first[1].weights == second[1].weights
    assert first[1].key == second[1].key
    assert "teaching a new tiny model" in first[2]
    assert f"model.cache={tmp_path}" in "".join(second[2].split())
    assert not equal(alone[0], other[0])


def test_weights_of_half_precision_are_kept_as_they_are(tmp_path):
    words = [*QUICK, f"model.cache={tmp_path}", "model.weights=bfloat16"]
    made, found = begun(settings(*words)), begun(settings(*words))
    assert found[1].source == "cache"
    assert equal(made[0], found[0])
    assert (
        {w.dtype for w in weights(made[0])} == {w.dtype for w in weights(found[0])} == {torch.float32, torch.bfloat16}
    )


def measured(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [without_clock(row) for row in rows]


def test_a_run_from_the_cache_is_the_run_from_a_new_model(tmp_path):
    learned = ["algorithm=sft", "n_steps=2", "train_batch_size=8", "eval_problems=8", "sampling.max_tokens=16"]
    run = settings(*QUICK, *learned, f"model.cache={tmp_path / 'kept'}", "data.n_validation=8", "log_generations=0")
    for name in ("made", "cache"):
        train(run, RunWriter(tmp_path / name, "seed: 0\n"), Console())
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["start"]["source"] == name
    assert measured(tmp_path / "made") == measured(tmp_path / "cache")
    assert any(row.get("train/grad_norm") for row in measured(tmp_path / "made"))


# --- The model that comes with the package ---


def described() -> list[Path]:
    return sorted(SHIPPED.glob("*.json"))


def words_of(description: Path) -> list[str]:
    return json.loads(description.read_text())["made by"].split()[3:]


def test_the_default_run_starts_from_what_was_shipped_whatever_its_seed():
    recipe, _ = recipe_for(settings())
    found = find_shipped(recipe)
    assert found is not None, "the default start model is another now: python tools/start_model.py"
    assert checksum(found) == json.loads((SHIPPED / "r1_zero_short.json").read_text())["weights"]
    assert find_shipped(recipe | {"seed": 1}) is None


@pytest.mark.parametrize("description", described(), ids=lambda path: path.stem)
def test_every_shipped_model_belongs_to_the_command_that_it_names(description):
    recipe, _ = recipe_for(settings_from(words_of(description)))
    assert find_shipped(recipe) is not None, "made of something else: run the command in its description"


def test_a_model_is_shipped_with_its_recipe(tmp_path, capsys):
    path = ship(QUICK, tmp_path)
    recipe = json.loads(path.with_suffix(".json").read_text())["recipe"]
    assert find_shipped(recipe, tmp_path) is not None
    assert find_shipped(recipe | {"seed": 1}, tmp_path) is None


@pytest.mark.long
@pytest.mark.parametrize("description", described(), ids=lambda path: path.stem)
def test_a_shipped_model_is_what_the_warm_start_makes(description, tmp_path):
    """Bit by bit where torch and the processor are those that made it; elsewhere as good, within sampling error."""
    run, kept = settings_from(words_of(description)), json.loads(description.read_text())
    policy, recipe, maker = make(run, Console())
    assert json.loads(json.dumps(recipe)) == kept["recipe"]
    made = dict(policy.named_weights())
    shipped = find_shipped(recipe)
    assert shipped is not None
    if {name: value for name, value in maker.items() if name != "code"} == kept["maker"]:
        assert checksum(made) == kept["weights"]
    run.model.warm_start.steps = 0  # the other parts are as in a run, and is given each of the two models
    components = build_components(run, tmp_path, Console())
    try:
        accuracies, monitors = [], Monitors(1, print)
        for one in (made, shipped):
            for name, weight in components.policy.named_weights():
                weight.copy_(one[name])
            accuracies.append(
                components.evaluator.evaluate(components.final_problems, 0, monitors).metrics["eval/accuracy"]
            )
    finally:
        components.close()
    assert abs(accuracies[0] - accuracies[1]) < 0.1
