"""What one sweep hands to the next: whatever wins, the next one composes, and its settings stay different ones."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from rlreason.cli.check_runs import designed as design_of
from rlreason.cli.check_runs import file_of, refuse_repeated, request_of_stage, stage_of
from rlreason.cli.compose import composed_run
from rlreason.cli.flags import composing, read
from rlreason.errors import ConfigError
from rlreason.sweeps.carry import carry
from rlreason.sweeps.state import RunState, SweepState, new_state, read_state, write_state
from tests.some import some
from tests.sweep_folders import answers, designed, ended, sweep

LR = {"learning_rate": "1e-4"}


def settings_of(sweep_name: str, carried: list[str], *words: str) -> list[str]:
    """What each run of a sweep comes to, without its seed; of one seed."""
    runs = designed(f"sweep={sweep_name}", "seed=0", *words, carried=carried).runs
    with composing(read([])):
        return [repr(composed_run(run.overrides, "config", of_sweep=True).run) for run in runs]


@pytest.mark.parametrize(
    ("name", "carried"),
    some(
        [
            ("grpo_off_policy_focused", ["epochs_per_rollout=2", "train_batch_size=64"]),
            ("objectives", ["loss=grpo_no_clip", "std_norm=none"]),
            ("cs336_2026_on_policy", ["length_norm=constant", "std_norm=none"]),
            ("kl", ["std_norm=group_std"]),
        ],
        4,
    ),
)
def test_a_carried_word_never_makes_two_settings_the_same_run(name, carried):
    alone = settings_of(name, [])
    assert settings_of(name, carried) == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_stage_of_the_assignment_composes_with_every_winner_of_those_before(every):
    asked = read(["-m", "sweep=grpo_assignment", "seed=0"])
    with composing(asked):
        chain = file_of(asked.overrides).chain
        asked = replace(asked, chain=tuple(chain), folder=Path("x"))
        won: dict[str, list[list[str]]] = {}
        for stage in chain:
            of_stage = request_of_stage(asked, stage)
            for before in won:
                for winner in won[before]:
                    for run in design_of(of_stage, note=str, carried=winner).runs:
                        composed_run(run.overrides, "config", of_sweep=True)
            file, runs = file_of([f"sweep={stage}"]), design_of(of_stage, note=str).runs
            if file.carries and stage != "grpo_learning_rate":  # a number composes with everything
                winners = [[f"{key}={value}" for key, value in run.setting.items()] for run in runs]
                won[stage] = winners if every else winners[-1:]
        assert list(itertools.chain.from_iterable(won.values()))


CHANCE = {(1, 256): 0.5, (1, 16): None, (2, 64): 0.7, (4, 64): 0.6, (1, 128): 0.55, (4, 16): 0.1}


def broad(folder: Path) -> None:
    """A broad sweep off policy that has run: two seeds of six settings, one of which diverged."""
    runs = []
    for (epochs, batch), chance in CHANCE.items():
        setting = {"epochs_per_rollout": str(epochs), "train_batch_size": str(batch)}
        for seed in (0, 1):
            name = f"epochs_per_rollout={epochs},train_batch_size={batch},seed={seed}"
            ended(folder / name, None if chance is None else answers(seed, chance))
            runs.append(RunState(name, [], setting, seed))
    first = {"epochs_per_rollout": "1", "train_batch_size": "256"}
    command = "python -m rlreason -m sweep=grpo_assignment"
    state = SweepState(folder.name, command, list(first), first, "finished", 1, "processes", runs, sweep=folder.name)
    write_state(folder, state)


def test_the_broad_sweep_hands_its_best_settings_to_the_focused_one(tmp_path):
    """The chain ran a focused sweep over four settings that nothing had chosen."""
    stages = ("grpo_off_policy_broad", "grpo_off_policy_focused")
    broad(tmp_path / stages[0])
    asked = replace(read(["-m", "sweep=grpo_assignment", "seed=0,1"]), chain=stages, folder=tmp_path)
    with composing(asked):
        assert {*stages, "grpo_prompt_ablation"} <= set(file_of(asked.overrides).chain)
        focused = stage_of(asked, stages[1], note=str).design
        by_hand = replace(asked, overrides=[*asked.overrides, "off_policy=on_policy,e1_quarter"])
        typed_arms = stage_of(by_hand, stages[1], note=str).design
    found = [(int(one["epochs_per_rollout"]), int(one["train_batch_size"])) for one in focused.settings()]
    assert found == [(1, 256), (2, 64), (4, 64), (1, 128)]
    assert focused.reference == focused.settings()[0]
    assert [one["off_policy"] for one in typed_arms.settings()] == ["on_policy", "e1_quarter"]


def test_the_train_batches_of_the_broad_sweep_are_shares_of_the_rollout_batch():
    """With another rollout batch the chain was refused at its broad stage, whose train batches were larger."""
    design = designed("sweep=grpo_off_policy_broad", "rollout_batch_size=64", "seed=0")
    assert [one["train_batch_size"] for one in design.settings()[:5]] == ["4", "8", "16", "32", "64"]
    assert design.reference == {"epochs_per_rollout": "1", "train_batch_size": "64"}


def test_words_that_make_the_same_run_are_said():
    runs = designed("off_policy=on_policy,e1_quarter", "epochs_per_rollout=1", "train_batch_size=64", "seed=0").runs
    with composing(read([])):
        composed = [composed_run(run.overrides, "config", of_sweep=True).run for run in runs]
    with pytest.raises(ConfigError, match=r"^off_policy=on_policy and off_policy=e1_quarter make the same run"):
        refuse_repeated(composed, runs)


def test_runs_that_the_clock_ended_side_by_side_are_not_compared(tmp_path):
    state = sweep(tmp_path, "learning_rate", ["1e-4", "1e-3"], lambda value, seed: answers(seed, 0.5), reference=LR)
    for run in state.runs:
        run.shared_machine = True
    write_state(tmp_path, state)
    carry(tmp_path)  # every step was done: nothing depends on the clock
    for run in state.runs:
        run.status, run.reason = "budget", "budget.hours=1: 0 s are left"
    write_state(tmp_path, state)
    for run in state.runs:
        summary = tmp_path / run.name / "summary.json"
        summary.write_text(
            summary.read_text().replace('"finished", "reason": ""', f'"budget", "reason": "{run.reason}"')
        )
    with pytest.raises(ConfigError, match=r"budget.hours"):
        carry(tmp_path)


def test_other_seeds_typed_later_leave_those_before_in_the_state(tmp_path):
    before = sweep(tmp_path, "learning_rate", ["1e-4", "1e-3"], lambda value, seed: answers(seed, 0.5), reference=LR)
    before.runs[0].shared_machine = True
    write_state(tmp_path, before)
    design = designed("learning_rate=1e-4,1e-3", "seed=4,5", f"hydra.sweep.dir={tmp_path}")
    now = new_state(design, 1, "processes", "", [])
    assert {run.seed for run in now.runs} == {0, 1, 2, 3, 4, 5}
    assert next(run for run in now.runs if run.name == before.runs[0].name).shared_machine
    assert {run.status for run in now.runs if run.seed < 4} == {"finished"}
    write_state(tmp_path, now)
    assert [isinstance(run, RunState) for run in read_state(tmp_path).runs] == [True] * 12
