"""What a finished sweep hands on to the next one, and which settings of a running one are stopped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlreason.cli.check import check_command_line
from rlreason.errors import ConfigError
from rlreason.records.reader import write_status
from rlreason.sweeps.carry import carry, losers, sweep_folder, why_dominated
from rlreason.sweeps.closing import CHOOSING, COMPARING, half_of, purposes
from rlreason.sweeps.state import DOMINATED, SweepState, read_state, write_state
from tests.sweep_folders import PROTOCOL, Answers, answers, sweep

LR = {"learning_rate": "1e-4"}
CHANCE = {"1e-4": 0.5, "1e-3": 0.8, "1e-2": 0.2}


def by_chance(value: str, seed: int) -> list[bool]:
    return answers(seed, CHANCE[value])


def rates(folder: Path, of: Answers = by_chance, **more: Any) -> SweepState:
    """A sweep over learning rates whose runs have all ended."""
    return sweep(folder, "learning_rate", list(CHANCE), of, **{"reference": LR, **more})


def test_the_winner_of_a_sweep_is_carried_with_its_difference(tmp_path):
    rates(tmp_path)
    found = carry(tmp_path)
    assert (found.words, found.kept_default) == (["learning_rate=1e-3"], False)
    assert found.means["learning_rate=1e-3"] > 0.7
    assert found.difference.problems + found.apart.problems == 200  # the halves share no problem
    assert found.difference.low > 0.2
    assert "learning_rate=1e-3: better by 0." in found.sentence
    assert "model=tiny data=stories_long" in found.sentence
    assert json.loads(json.dumps(found.plain()))["difference"]["seeds"] == 4


def test_a_winner_of_another_model_is_refused_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rates(tmp_path / "tiny")
    words = ["-m", "sweep=grpo_baselines", f"carry={tmp_path}/tiny"]
    asked = check_command_line([*words, "seed=0,1"], note=str)
    assert asked.design is not None
    assert "learning_rate=1e-3" in asked.design.runs[0].overrides
    with pytest.raises(ConfigError) as caught:
        check_command_line([*words, "model=local", f"model.path={tmp_path}", "scale=laptop", "data=stories"], note=str)
    said = str(caught.value)
    assert f"local ({tmp_path})" in said
    assert "(learning_rate=1e-3)" in said


def test_what_cannot_be_told_apart_keeps_the_default(tmp_path):

    def of(value: str, seed: int) -> list[bool]:
        return answers(seed + 50 * (value == "b"), 0.5)

    sweep(tmp_path, "loss", ["a", "b"], of, reference={"loss": "a"})
    found = carry(tmp_path)
    assert (found.words, found.kept_default) == ([], True)
    assert "keeps the default loss=a" in found.sentence
    if found.difference is not None:  # the other one had the larger mean
        assert "cannot tell" in found.sentence
        assert "would settle" in found.sentence


def test_a_default_that_is_best_stays(tmp_path):
    rates(tmp_path, reference={"learning_rate": "1e-3"})
    found = carry(tmp_path)
    assert found.kept_default
    assert found.words == []
    assert "no other setting" in found.sentence


def test_one_seed_never_carries(tmp_path):
    rates(tmp_path, seeds=(0,))
    found = carry(tmp_path)
    assert (found.words, found.kept_default) == ([], True)
    assert "these two trained models" in found.sentence
    assert "seeds would settle" in found.sentence


def test_the_half_that_chooses_is_the_only_one_that_decides(tmp_path):
    """b is right on every problem kept apart and on none of the others."""

    def of(value: str, seed: int) -> list[bool]:
        if value == "a":
            return [k % 3 == seed % 3 for k in range(120)]
        return [half_of(f"What is {k} + 1?") == COMPARING for k in range(120)]

    sweep(tmp_path, "loss", ["a", "b"], of, reference={"loss": "a"})
    assert carry(tmp_path).kept_default
    assert {half_of(f"What is {k} + 1?") for k in range(120)} == {CHOOSING, COMPARING}


def test_a_diverged_run_counts_as_wrong_on_every_problem(tmp_path):
    rates(tmp_path, lambda v, s: None if (v, s) == ("1e-3", 2) else by_chance(v, s))
    found = carry(tmp_path)
    assert found.means["learning_rate=1e-3"] == pytest.approx(0.6, abs=0.06)
    assert found.kept_default
    assert "learning_rate=1e-3,seed=2 counts as diverged" in found.sentence


def test_the_final_evaluation_of_a_run_that_an_evaluation_ended_is_the_whole_one(tmp_path):
    """The evaluation behind step 5 finds accuracy 0 on 100 problems and ends the run; all 200 are asked after it."""
    state = sweep(tmp_path, "learning_rate", ["1e-4", "1e-2"], by_chance, reference=LR)
    for run in state.runs[4:]:
        whole = tmp_path / run.name / "evals/step_00040.jsonl"
        lines = whole.read_text().splitlines(keepends=True)
        (whole.parent / "step_00005.jsonl").write_text("".join(lines[:100]))
        whole.rename(whole.parent / "step_00005_update_00005.jsonl")
    assert carry(tmp_path).kept_default


def test_a_sweep_that_is_not_whole_is_refused_by_the_names_of_its_runs(tmp_path):
    state = rates(tmp_path)
    (tmp_path / "learning_rate=1e-3,seed=1" / "summary.json").unlink()
    state.runs[5].status, state.runs[5].reason = "failed", "exit code 1"
    (tmp_path / "learning_rate=1e-3,seed=1" / "status.json").write_text(
        json.dumps({"status": "failed", "reason": "exit code 1", "time": "now"})
    )
    write_state(tmp_path, state)
    with pytest.raises(ConfigError, match=r"1 of its 12 runs .*learning_rate=1e-3,seed=1: failed"):
        carry(tmp_path)


def test_a_sweep_without_a_reference_is_refused_with_the_cure(tmp_path):
    rates(tmp_path, reference=None)
    with pytest.raises(ConfigError, match=r"`reference: \[key=value\]`"):
        carry(tmp_path)
    other = tmp_path / "other"
    sweep(other, "learning_rate", ["1e-3", "1e-2"], by_chance, reference=LR)
    with pytest.raises(ConfigError, match="reference learning_rate=1e-4"):
        carry(other)


def test_settings_that_were_measured_otherwise_are_refused(tmp_path):
    cooler = PROTOCOL | {"sampling.temperature": 0.5, "hash": "bb"}
    rates(tmp_path / "lr", protocols={"1e-3": cooler})
    with pytest.raises(ConfigError, match=r"sampling.temperature: 1.0 and 0.5"):
        carry(tmp_path / "lr")
    hot = {"eval.sampling.temperature": "1e-4"}
    sweep(
        tmp_path / "t", "eval.sampling.temperature", list(CHANCE), by_chance, reference=hot, protocols={"1e-3": cooler}
    )
    assert "sampling.temperature on purpose" in carry(tmp_path / "t").sentence
    assert purposes(["eval.prompt.stop", "prompt"]) == ("prompt", "chat.", "reward", "stop")


def test_other_problems_are_refused(tmp_path):
    rates(tmp_path, lambda v, s: by_chance(v, s)[: 200 - (v == "1e-3")])
    with pytest.raises(ConfigError, match=r"\(p199\)"):
        carry(tmp_path)


def test_a_name_that_no_sweep_has_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/sweeps/grpo_baselines").mkdir(parents=True)
    assert sweep_folder("grpo_baselines").is_dir()
    with pytest.raises(ConfigError, match=r"carry=grpo_baseline .*carry=grpo_baselines"):
        sweep_folder("grpo_baseline")


def test_a_sweep_is_carried_by_what_it_is_and_the_one_of_this_model_before_another(tmp_path, monkeypatch):
    """`carry=grpo_baselines` did not find what `sweep=grpo_baselines experiment=...` had left."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs/sweeps"
    for name in ("grpo_learning_rate,experiment=x", "mine", "typed"):
        state = sweep(place / name, "learning_rate", ["1e-4", "1e-3"], by_chance, reference=LR)
        state.sweep = "" if name == "typed" else "grpo_learning_rate"
        write_state(place / name, state)
    for run in (place / "mine").glob("*seed=*"):
        (run / "config.yaml").write_text("algorithm: grpo\nmodel: {name: big, path: null}\ndata: {name: math}\n")
    found = {of: sweep_folder("grpo_learning_rate", *of).name for of in (("tiny", "stories_long"), ("big", "math"))}
    assert list(found.values()) == ["grpo_learning_rate,experiment=x", "mine"]
    sweep(place / "grpo_learning_rate", "learning_rate", ["1e-4"], by_chance, reference=LR)
    assert sweep_folder("grpo_learning_rate", "big", "math").name == "mine"
    assert sweep_folder("grpo_learning_rate", "tiny", "stories_long").name == "grpo_learning_rate"
    assert sweep_folder("typed").name == "typed"


def test_a_setting_that_surely_loses_is_stopped_and_the_reference_never(tmp_path):
    state = rates(tmp_path, seeds=range(5))
    for run in state.runs[3:5] + state.runs[8:10] + state.runs[13:15]:  # three seeds of each have ended
        (tmp_path / run.name / "summary.json").unlink()
    why = {value: why_dominated(tmp_path / f"learning_rate={value},seed=3") for value in CHANCE}
    assert [value for value in CHANCE if why[value]] == ["1e-2"]
    assert "learning_rate=1e-4 by 0." in why["1e-2"]
    (stopped := tmp_path / "learning_rate=1e-2,seed=3").mkdir(exist_ok=True)
    write_status(stopped, DOMINATED, "it cannot win")
    assert why_dominated(tmp_path / "learning_rate=1e-2,seed=4") == "it cannot win"  # as the seed before it
    assert read_state(tmp_path).stopped_settings == [{"setting": {"learning_rate": "1e-2"}, "reason": "it cannot win"}]


def test_two_seeds_stop_nothing_and_neither_do_the_last_ones():
    setting = [(("lr", str(k)),) for k in range(3)]
    right = {key: {seed: np.full(64, 1.0 - 0.5 * k) for seed in range(2)} for k, key in enumerate(setting)}
    assert losers(right, setting[0], 3, 4) == {}
    right = {key: of | {2: of[0]} for key, of in right.items()}
    assert list(losers(right, setting[0], 3, 4)) == setting[1:]
    assert losers(right, setting[0], 3, 3) == {}  # all have run
    assert list(losers(right, None, 3, 4)) == setting[1:]  # each with each
    assert losers(right, setting[2], 3, 4) == {}  # the reference loses, and stays


def test_settings_that_cannot_be_compared_stop_nothing_and_say_so(tmp_path):
    said: list[str] = []
    stops = {"1e-2": PROTOCOL | {"stop": ["x"]}}
    rates(tmp_path, protocols=stops)
    assert not why_dominated(tmp_path / "learning_rate=1e-2,seed=3", said.append)
    assert len(said) == 1
    assert "stops nothing" in said[0]


@pytest.mark.long
def test_looking_again_and_again_stops_equal_settings_as_rarely_as_promised():
    """Four settings equal to the reference, six seeds, a look after each seed from the third on: 1,000 sweeps."""
    rng, wrong = np.random.default_rng(4), 0
    keys = [(("lr", str(k)),) for k in range(5)]
    for _ in range(1000):
        hard = rng.random(128)
        right = {
            key: {s: (hard + rng.normal(0, 0.2, 128) + rng.normal(0, 0.04) > 0.5) * 1.0 for s in range(6)}
            for key in keys
        }
        looks = ({key: {s: of[s] for s in range(seen)} for key, of in right.items()} for seen in (3, 4, 5))
        wrong += any(losers(look, keys[0], 5, 6) for look in looks)
    assert wrong / 1000 < 0.071
