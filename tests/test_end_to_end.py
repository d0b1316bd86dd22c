"""The real command line on the smallest run there is, and steps of a whole run computed again in plain torch.

That catches what no test of a part can: a wrong row, mask, divisor, group, rate or order between the parts.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlreason import load_run, train
from rlreason.records.loggers import AXES, COUNTERS
from rlreason.records.reader import without_clock
from tests.run_records import lines_of
from tests.starts import SMALL, UNUSED, loaded


def no_metric_lacks_an_axis(folder: Path) -> bool:
    """Whether Weights & Biases would draw every metric of a run over a counter of steps."""
    names = {name for row in rows_of(folder) for name in row}
    drawn = {name for of_counter in AXES.values() for name in of_counter}
    return all(drawn & {name, f"{name.partition('/')[0]}/*"} for name in names - set(COUNTERS))


def rows_of(folder: Path, metric: str = "rollout_step") -> list[dict]:
    return [row for row in load_run(folder).metrics if metric in row]


def test_there_is_a_finite_row_for_every_update_and_every_row_carries_every_counter(finished_run):
    folder = finished_run.folder
    rows, updates, evals = rows_of(folder), rows_of(folder, "train/loss"), rows_of(folder, "eval/accuracy")
    counters = ("rollout_step", "train_step", "eval_step", "tokens/generated", "tokens/trained")
    for name in (*counters, "time/active", "time/total"):
        values = [row[name] for row in rows]
        assert values == sorted(values), name
    assert [(r["rollout_step"], r["train_step"]) for r in updates] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [(r["eval_step"], r["train_step"]) for r in evals] == [(1, 0), (2, 2), (3, 4)]
    saved = [json.loads(line) for path in sorted((folder / "rollouts").iterdir()) for line in lines_of(path)]
    assert len(saved) == 2 * 16
    assert rows[-1]["tokens/generated"] == sum(r["length"] for r in saved)
    assert rows[-1]["tokens/trained"] == 2 * rows[-1]["tokens/generated"] == sum(r["train/tokens"] for r in updates)
    assert rows[-1]["time/active"] < rows[-1]["time/total"] - sum(r.get("time/eval", 0) for r in rows)
    assert [("reward/mean" in r, "grading/responses" in r) for r in updates] == [(True, True), (False, False)] * 2
    for name in ("train/ratio", "train/approx_kl", "train/entropy", "train/grad_norm", "train/clip_fraction"):
        assert all(math.isfinite(r[name]) for r in updates), name
    assert all(r["rollout/mismatch_max"] < 1e-4 < 0.25 < r["rollout/distinct"] for r in rows_of(folder, "reward/mean"))
    assert all({"eval/accuracy", "eval/format", "eval/length"} <= r.keys() for r in evals)
    assert no_metric_lacks_an_axis(folder)
    summary = load_run(folder).summary
    assert [summary[name] for name in counters] == [rows[-1][name] for name in counters]
    assert json.loads((folder / "status.json").read_text())["status"] == summary["status"] == "finished"


def test_ratios_to_unchanged_weights_are_1_in_half_precision_too(tmp_path):
    """Bug: old log-probabilities are rounded otherwise than new ones, and a narrow clip range cuts by chance."""
    words = ("model.dtype=bfloat16", "loss=grpo_clip", "train_batch_size=4", "learning_rate=1e-30", "weight_decay=0")
    run = train(*SMALL, *words, "n_steps=1", "eval_every=0", f"hydra.run.dir={tmp_path / 'run'}")
    found = [(row["train/ratio"], row["train/approx_kl"]) for row in rows_of(run.folder, "train/loss")]
    assert found == [(1.0, 0.0)] * 4


def test_the_same_command_gives_the_same_numbers_and_loads_nothing_that_it_has_no_use_for(finished_run, tmp_path):
    """In a fresh Python too, which hashes texts with a seed of its own. Bug: a run waits for a library of others."""
    ((code, modules),) = loaded(tmp_path, ["loss=grpo_clip", "epochs_per_rollout=2", *SMALL, "hydra.run.dir=again"])
    assert (code, modules & {"torch", *UNUSED}) == (0, {"torch"})
    first, again = (
        [without_clock(row) for row in rows_of(place)] for place in (finished_run.folder, tmp_path / "again")
    )
    assert first == again
    assert (tmp_path / "again/curves.png").exists()


CLIP, PEAK = 0.2, 3e-3


def step_by_hand(model, optimizer, rows, rates: list[float]) -> None:
    """Take the updates of one step: group-standardised advantages, clipped ratio, mean of means, clipped gradient."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["problem_id"], []).append(row["reward"])

    def advantage(row) -> float:
        group = torch.tensor(rewards[row["problem_id"]])
        return float((row["reward"] - group.mean()) / (group.std() + 1e-6))

    def log_probs(row) -> torch.Tensor:  # of the response tokens, one sequence at a time, no padding
        ids = torch.tensor([[*row["prompt_ids"], *row["token_ids"]]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]

    with torch.no_grad():
        old = [log_probs(row) for row in rows]
    for rate in rates:
        optimizer.zero_grad()
        for row, before in zip(rows, old, strict=True):
            ratio = (log_probs(row) - before).exp()
            credit = advantage(row)
            surrogate = torch.minimum(ratio * credit, ratio.clamp(1 - CLIP, 1 + CLIP) * credit)
            (-surrogate.mean() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


@pytest.mark.parametrize(
    ("loss", "epochs"), [pytest.param("reinforce_with_baseline", 1, marks=pytest.mark.long), ("grpo_clip", 2)]
)
def test_a_run_takes_the_steps_that_the_formulas_give(policy, tmp_path, monkeypatch, loss, epochs):
    monkeypatch.chdir(tmp_path)
    policy.save(tmp_path / "start")
    train(
        "model=local", "model.path=start", "data=stories", "prompt=r1_zero_short", "scale=embedded", f"loss={loss}",
        "n_steps=2", "rollout_batch_size=16", "group_size=4", "threads=1",
        f"epochs_per_rollout={epochs}", f"learning_rate={PEAK}", "lr_schedule=linear", "warmup_steps=1",
        "data.n_train=64", "data.n_validation=4", "eval_problems=4", "eval_every=0", "save_rollouts_every=1",
        "sampling.min_tokens=0", "sampling.max_tokens=16", "micro_batch_tokens=150", "hydra.run.dir=run",
        "eval.sets.hard.data=stories_hard", "eval.sets.hard.problems=3", "eval.sets.hard.samples=2",
        "prompt.reward=own_reward:some_of_each", quiet=True,
    )  # fmt: skip
    run = load_run(tmp_path / "run")
    measured = {key: run.summary["sets"]["hard"][key] for key in ("problems", "samples")}
    assert measured == {"problems": 3, "samples": 6}
    assert 0 <= run.metrics[-1]["eval/hard/accuracy"] == run.summary["sets"]["hard"]["accuracy"]
    updates = [row for row in run.metrics if "train/loss" in row]
    rates = [row["train/learning_rate"] for row in updates]
    expected = [PEAK * (k + 1) / epochs for k in range(epochs)]  # the first step
    expected += [PEAK * (epochs - k) / epochs for k in range(epochs)]  # the last one: linearly to the end of the run
    assert rates == pytest.approx(expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95), eps=1e-8)
    for step, file in enumerate(sorted((tmp_path / "run/rollouts").iterdir())):
        rows = [json.loads(line) for line in lines_of(file)]
        step_by_hand(model, optimizer, rows, rates[step * epochs : (step + 1) * epochs])
    assert step == 1
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    before = policy.model.state_dict()
    for name, weight in model.state_dict().items():
        assert (trained[name] - weight).abs().max() < 0.005 * (trained[name] - before[name]).abs().max(), name
