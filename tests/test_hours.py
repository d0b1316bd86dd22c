"""Planning for a card that is not here: hours by the published steps, and what of an assignment fits."""

from dataclasses import replace

import pytest

from rlreason.cli.plan import SweepCost, fitting_sweeps
from rlreason.config.store import typed
from rlreason.model.hours import CARDS, PARAMETERS, hours, tokens_of


@pytest.fixture
def run(composed):
    return lambda *words: typed(composed("experiment=cs336_2025", "rollout=vllm", "data.path=a/b", *words))


def test_the_published_step_gives_the_published_hours(run):
    """Bug: a unit. 200 steps of 30 to 54 s are 1.7 to 3 h, and evaluations come on top."""
    bare = run("eval_every=0", "interim_eval_problems=1", "eval.final_problems=1")
    low, high = hours(bare, int(PARAMETERS), CARDS["h100"])
    assert low == pytest.approx(200 * 30 / 3600, rel=0.01)
    assert high == pytest.approx(200 * 54 / 3600, rel=0.01)
    assert hours(run(), int(PARAMETERS), CARDS["h100"])[0] > low


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        (["n_steps=100"], 0.5),
        (["sampling.max_tokens=512"], 0.5),
        (["rollout_batch_size=128", "train_batch_size=128"], 0.5),
        (["loss=grpo_clip", "epochs_per_rollout=3"], 2.0),
    ],
)
def test_tokens_grow_with_what_is_sampled_and_learned(run, words, factor):
    """Bug: epochs count as sampling, or a limit of tokens is not read."""
    few = ("eval_every=0", "interim_eval_problems=1", "eval.final_problems=1")
    assert tokens_of(run(*few, *words)) == pytest.approx(factor * tokens_of(run(*few)), rel=0.01)


@pytest.mark.parametrize("words", [["algorithm=sft", "data.train=x", "epochs=2", "n_steps=null"], ["algorithm=ei"]])
def test_every_algorithm_has_its_tokens(run, words):
    assert tokens_of(run(*words)) > 0


def test_what_fits_has_the_most_seeds_then_the_most_steps(run):
    """Bug: fewer seeds than fit, or sweeps are said to fit that do not."""
    rows, settings = [SweepCost("a", 2, 1.0, 2.0), SweepCost("b", 3, 2.0, 3.0)], replace(run(), n_steps=200)
    last = {limit: fitting_sweeps(rows, limit, settings)[-1 if limit >= 10 else -2] for limit in (1, 3, 5, 10, 20, 99)}
    assert "seed=0,1,2,3:" in last[20]
    assert "seed=0,1:" in last[10]
    assert "seed=0:" in last[5]
    assert last[99] == last[20].replace("20 hours", "99 hours")
    assert "n_steps=100" in last[3]
    assert "the first 1 of 2" in last[1]
    assert "n_steps=50" in last[1]
