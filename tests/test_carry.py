"""What a finished sweep hands on to the next one, and which settings of a running one are stopped."""

import itertools
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlreason.cli.sweep import print_table
from rlreason.errors import ConfigError
from rlreason.records.reader import write_status
from rlreason.report.carry import carry, losers, sweep_folder, why_dominated
from rlreason.report.study import purposes
from rlreason.runtime.statistics import Difference, Floats, compared
from rlreason.sweeps.state import DOMINATED, Key, SweepState, begun, read_state, write_state
from tests.sweep_folders import PROTOCOL, Answers, answers, checked, designed, looked, sweep

LR = {"learning_rate": "1e-4"}
CHANCE = {"1e-4": 0.5, "1e-3": 0.8, "1e-2": 0.2}


def by_chance(value: str, seed: int) -> list[bool]:
    return answers(seed, CHANCE[value])


def rates(folder: Path, of: Answers = by_chance, **more: Any) -> SweepState:
    """A sweep over learning rates whose runs have all ended."""
    return sweep(folder, "learning_rate", list(CHANCE), of, **{"reference": LR, **more})


def test_the_winner_of_a_sweep_is_carried_and_stands_in_its_table(tmp_path, capsys):
    """Bug: the default is kept where another setting wins, or both halves of the problems are one."""
    rates(tmp_path)
    found = carry(tmp_path)
    assert (found.words, found.kept_default) == (["learning_rate=1e-3"], False)
    assert (found.means["learning_rate=1e-3"] > 0.7, found.difference.low > 0.2) == (True, True)
    assert found.difference.problems + found.apart.problems == 200  # the halves share no problem
    assert "1e-3 is better than 1e-4 by" in found.sentence
    assert len(print_table(tmp_path).runs) == 12
    words = {tuple(line.split()[:2]): line.split() for line in capsys.readouterr().out.splitlines() if line}
    mean, low, _, high, word = words["1e-3", "4"][2:7]
    assert (0 < float(low) < float(mean) < float(high) <= 1, word) == (True, "better")
    assert "worse" in words["1e-2", "4"]


def test_a_diverged_run_counts_as_wrong_on_every_problem_and_the_evaluation_that_ends_a_run_is_not_its_last(tmp_path):
    state = rates(tmp_path / "ended")
    for run in state.runs[4:]:  # an evaluation finds accuracy 0 on 100 problems; all 200 are asked after it
        whole = tmp_path / "ended" / run.name / "evals/step_00040.jsonl"
        (whole.parent / "step_00005.jsonl").write_text("\n".join(whole.read_text().splitlines()[:100]) + "\n")
        whole.rename(whole.parent / "step_00005_update_00005.jsonl")
    assert carry(tmp_path / "ended").words == ["learning_rate=1e-3"]
    rates(tmp_path / "diverged", lambda v, s: None if (v, s) == ("1e-3", 2) else by_chance(v, s))
    found = carry(tmp_path / "diverged")
    assert found.means["learning_rate=1e-3"] == pytest.approx(0.6, abs=0.06)
    assert (found.kept_default, "1e-3 diverged in 1 of 4 seeds" in found.sentence) == (True, True)


def test_a_winner_of_another_model_is_refused_with_the_cure(tmp_path, monkeypatch):
    """Bug: a learning rate is carried to a model for which it is a hundred times too large."""
    monkeypatch.chdir(tmp_path)
    rates(tmp_path / "tiny")
    words = ["loss=gspo,cispo", "seed=0", f"carry={tmp_path}/tiny"]
    assert "learning_rate=1e-3" in checked(*words)[0].design.runs[0].overrides
    with pytest.raises(ConfigError, match=r"carry=.*\(learning_rate=1e-3\)"):
        checked(*words, "model=local", f"model.path={tmp_path}", "scale=laptop", "data=stories")


def test_what_cannot_be_told_apart_keeps_the_default(tmp_path):
    """Bug: a setting is carried that leads by chance, by one seed, or on the problems that did not choose it alone."""
    loss: Any = {"key": "loss", "values": ["a", "b"], "reference": {"loss": "a"}}
    sweep(tmp_path / "s", of=lambda v, s: answers(s + 50 * (v == "b"), 0.5), **loss)
    rates(tmp_path / "best", reference={"learning_rate": "1e-3"})
    rates(tmp_path / "one", seeds=(0,))
    apart = [zlib.crc32(f"What is {k} + 1?".encode()) % 2 == 1 for k in range(120)]  # of the half that does not choose
    sweep(tmp_path / "halves", of=lambda v, s: apart if v == "b" else [k % 3 == s % 3 for k in range(120)], **loss)
    for name, word in (("s", "loss=a"), ("best", "no other setting"), ("one", "One seed on a side"), ("halves", "")):
        found = carry(tmp_path / name)
        assert (found.words, found.kept_default, word in found.sentence) == ([], True, True), name


def test_sweeps_that_cannot_be_compared_are_refused(tmp_path):
    rates(tmp_path / "unfinished")
    failed = tmp_path / "unfinished/learning_rate=1e-3,seed=1"
    (failed / "summary.json").unlink()
    write_status(failed, "failed", "exit code 1")
    rates(tmp_path / "none", reference=None)
    sweep(tmp_path / "other", "learning_rate", ["1e-3", "1e-2"], by_chance, reference=LR)
    rates(tmp_path / "problems", lambda v, s: by_chance(v, s)[: 200 - (v == "1e-3")])
    cooler = {"1e-3": PROTOCOL | {"sampling.temperature": 0.5, "hash": "bb"}}
    rates(tmp_path / "cooler", protocols=cooler)
    for name, says in {
        "unfinished": "1 of its 12 runs .*learning_rate=1e-3,seed=1: failed", "none": "is none: .*reference",
        "other": "learning_rate=1e-4, which has not run", "problems": "p199", "cooler": "temperature: 1.0 and 0.5",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            carry(tmp_path / name)
    hot = "eval.sampling.temperature"
    sweep(tmp_path / "t", hot, list(CHANCE), by_chance, reference={hot: "1e-4"}, protocols=cooler)
    assert "varies sampling.temperature on purpose" in carry(tmp_path / "t").sentence
    assert purposes(["eval.prompt.stop", "prompt"]) == ("prompt", "chat.", "reward", "stop")


def test_runs_that_the_clock_ended_side_by_side_are_not_compared_and_earlier_seeds_stay(tmp_path):
    """Bug: what runs reached in an hour that they shared is a verdict, or a sweep of other seeds forgets the first."""
    state = sweep(tmp_path, "learning_rate", ["1e-4", "1e-3"], lambda value, seed: answers(seed, 0.5), reference=LR)
    for run in state.runs:
        run.shared_machine = True
    write_state(tmp_path, state)
    carry(tmp_path)  # every step was done: nothing depends on the clock
    other_seeds = designed("learning_rate=1e-4,1e-3", "seed=4,5", f"hydra.sweep.dir={tmp_path}")
    runs = begun(other_seeds, tmp_path).runs
    assert [run.seed for run in runs].count(4) == [run.seed for run in runs].count(0) == 2
    assert {(run.status, run.shared_machine) for run in runs if run.seed < 4} == {("finished", True)}
    for summary in tmp_path.glob("*/summary.json"):
        by_clock = {"status": "budget", "reason": "budget.hours=1: 0 s are left"}
        summary.write_text(json.dumps(json.loads(summary.read_text()) | by_clock))
    with pytest.raises(ConfigError, match=r"budget\.hours"):
        carry(tmp_path)


def test_a_sweep_is_carried_by_what_it_is_and_the_one_of_this_model_before_another(tmp_path, monkeypatch):
    """`carry=grpo_baselines` did not find what `sweep=grpo_baselines experiment=...` had left."""
    monkeypatch.chdir(tmp_path)
    place, tiny, big = tmp_path / "runs/sweeps", ("tiny", "stories_long"), ("big", "math")
    for name in ("grpo_learning_rate,experiment=x", "mine", "typed"):
        state = sweep(place / name, "learning_rate", ["1e-4"], by_chance, reference=LR)
        state.sweep = "" if name == "typed" else "grpo_learning_rate"
        write_state(place / name, state)
    for run in (place / "mine").glob("*seed=*"):
        (run / "config.yaml").write_text("algorithm: grpo\nmodel: {name: big, path: null}\ndata: {name: math}\n")
    assert sweep_folder("grpo_learning_rate", *tiny).name == "grpo_learning_rate,experiment=x"
    sweep(place / "grpo_learning_rate", "learning_rate", ["1e-4"], by_chance, reference=LR)
    assert sweep_folder("grpo_learning_rate", *big).name == "mine"
    assert sweep_folder("grpo_learning_rate", *tiny).name == "grpo_learning_rate"
    assert sweep_folder("typed").name == "typed"
    (place / "grpo_learning_rate/learning_rate=1e-4,seed=0/summary.json").unlink()  # not finished, if newer
    assert sweep_folder("grpo_learning_rate", *tiny).name == "grpo_learning_rate,experiment=x"
    with pytest.raises(ConfigError, match="carry=grpo_learning_rat "):
        sweep_folder("grpo_learning_rat")


def test_a_look_decides_by_the_runs_own_validation(tmp_path):
    """Bug: a look at runs that were measured on `eval.sets` too ends in a traceback, or decides by another set."""
    state = rates(tmp_path / "s", lambda value, seed: answers(seed, 0.8 if value == "1e-3" else 0.5))
    write_state(tmp_path / "s", replace(state, max_seeds=8))
    before = looked(tmp_path / "s", 4)
    for run in (tmp_path / "s").glob("learning_rate=*"):
        shutil.copytree(run / "evals", tmp_path / run.name)
        shutil.move(tmp_path / run.name, run / "evals" / "hard")
    assert (looked(tmp_path / "s", 4), "better" in before[0].values()) == (before, True)


def test_a_failed_run_makes_no_look_give_a_setting_up(tmp_path):
    """Bug: a failed run leaves a look two seeds, or the accuracy of its start model, by which settings are given up for
    good, also once it has been run.
    """
    right = {"1e-4": (0, 0.5), "1e-3": (30, 0.53), "1e-2": (60, 0.53)}
    state = rates(tmp_path / "s", lambda value, seed: answers(seed + right[value][0], right[value][1]))
    write_state(tmp_path / "s", replace(state, max_seeds=6))
    assert [*looked(tmp_path / "s", 4)[0].values()] == ["unlikely to be decided with 6"]
    failed = tmp_path / "s" / "learning_rate=1e-4,seed=1"
    (failed / "summary.json").unlink()
    (failed / "evals/step_00040.jsonl").rename(failed / "evals/step_00000.jsonl")
    write_status(failed, "failed")
    with_start = looked(tmp_path / "s", 4)
    shutil.rmtree(failed)
    assert looked(tmp_path / "s", 4) == with_start
    ended, going = looked(tmp_path / "s", 3)
    assert (ended, len(going)) == ({}, 3)


def leads_of(right: dict[Key, dict[int, Floats]], reference: Key | None = None) -> dict[tuple[Key, Key], Difference]:
    pairs = [of for of in itertools.combinations(right, 2) if reference in (None, *of)]
    return {(a, b): compared(right[a], right[b]) for a, b in pairs}


def test_a_setting_that_surely_loses_is_stopped_and_the_reference_never(tmp_path):
    """Bug: where two problems ask the same, a setting that diverged has another number of questions, and it ends."""
    state = rates(tmp_path, lambda v, s: None if (v, s) == ("1e-2", 2) else by_chance(v, s), seeds=range(5))
    one, other = [text for k in range(20) if not zlib.crc32((text := f"What is {k} + 1?").encode()) % 2][:2]
    for path in tmp_path.glob("*/evals/*.jsonl"):
        path.write_text(path.read_text().replace(f'"{other}"', f'"{one}"'))
    for run in state.runs[3:5] + state.runs[8:10] + state.runs[13:15]:  # three seeds of each have ended
        (tmp_path / run.name / "summary.json").unlink()
    why = {value: why_dominated(tmp_path / f"learning_rate={value},seed=3") for value in CHANCE}
    assert [value for value in CHANCE if why[value]] == ["1e-2"]
    assert "worse than learning_rate=1e-4 by" in why["1e-2"]
    (stopped := tmp_path / "learning_rate=1e-2,seed=3").mkdir(exist_ok=True)
    write_status(stopped, DOMINATED, "it cannot win")
    assert why_dominated(tmp_path / "learning_rate=1e-2,seed=4") == "it cannot win"  # as the seed before it
    assert read_state(tmp_path).stopped_settings == [{"setting": {"learning_rate": "1e-2"}, "reason": "it cannot win"}]
    setting = [(("lr", str(k)),) for k in range(3)]
    right = {key: {seed: np.full(64, 1.0 - 0.5 * k) for seed in range(3)} for k, key in enumerate(setting)}
    two_seeds = {key: {0: of[0], 1: of[1]} for key, of in right.items()}
    first, last = setting[0], setting[2]
    lost = losers(leads_of(right, first), first, 3, 4), losers(leads_of(right), None, 3, 4)
    assert set(lost[0]) == set(lost[1]) == set(setting[1:])
    nothing = (two_seeds, first, 3, 4), (right, first, 3, 3), (right, last, 3, 4)  # too few; all ran; it stays
    assert [losers(leads_of(of, reference), reference, *n) for of, reference, *n in nothing] == [{}] * 3


def test_a_setting_that_loses_in_some_subjects_goes_on(tmp_path):
    """Bug: a setting that is worse in two of four subjects is stopped as if each problem told of it anew."""
    rates(tmp_path, lambda value, seed: [value != "1e-2" or k % 4 < 2 for k in range(200)], seeds=range(5))
    for run in tmp_path.glob("*seed=[34]"):
        (run / "summary.json").unlink()
    mine = tmp_path / "learning_rate=1e-2,seed=3"
    assert why_dominated(mine)
    for path in tmp_path.glob("*/evals/*.jsonl"):
        rows = [json.loads(line) | {"facts": {"subject": "abcd"[k % 4]}} for k, line in enumerate(path.open())]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not why_dominated(mine)


@pytest.mark.long
def test_looking_again_and_again_stops_equal_settings_as_rarely_as_promised():
    """Four settings equal to the reference, six seeds, a look after each seed from the third on: 1,000 sweeps."""
    rng, wrong = np.random.default_rng(4), 0
    keys = [(("lr", str(k)),) for k in range(5)]
    for _ in range(1000):
        hard = rng.random(128)
        right = [[(hard + rng.normal(0, 0.2, 128) + rng.normal(0, 0.04) > 0.5) * 1.0 for _ in range(6)] for _ in keys]
        looks = ({key: dict(enumerate(of[:seen])) for key, of in zip(keys, right, strict=True)} for seen in (3, 4, 5))
        wrong += any(losers(leads_of(look, keys[0]), keys[0], 5, 6) for look in looks)
    assert wrong / 1000 < 0.071
