"""Start models: one warm start for the prompts of an ablation, found again bit by bit, shipped with their recipes."""

import io
import json
from dataclasses import fields

import pytest
import torch

from rlreason.config.leaves import resource_dir
from rlreason.data.prepare import read_splits
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.training import warm_start as starts
from rlreason.training.build import make_policy
from tests.run_settings import altered, settings
from tests.some import some
from tools.start_model import make, settings_from, ship

FOUR = tuple(dict.fromkeys(starts.SHARED))
QUICK = ["model.width=32", "model.warm_start.steps=2", "model.warm_start.batch_size=8", "data.n_train=64"]


def begun(*words: str) -> tuple[Policy, starts.StartWeights, str]:
    """(policy with its habits, where they came from, what was said)."""
    run, out = settings(*QUICK, *words), io.StringIO()
    lessons = read_splits(run.data, print)[0]
    policy = make_policy(run, lessons)
    start = starts.teach_habits(run, policy, lessons, Console(out=out))
    return policy, start, out.getvalue()


def equal(one: Policy, other: Policy) -> bool:
    pairs = zip(one.named_weights(), other.named_weights(), strict=True)
    alike = all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in pairs)
    return alike and one.tokenizer.get_vocab() == other.tokenizer.get_vocab()


# What is taught


def test_the_prompts_of_an_ablation_start_from_bit_equal_weights():
    first, *_ = begun("prompt=r1_zero", "model.cache=null")
    words = "prompt=r1_zero", "prompt.reward=operator:eq", "prompt.stop=[]", "seed=1", "model.cache=null"
    assert equal(first, begun(*words)[0])
    taught = [starts.formats_of(settings(f"prompt={name}")) for name in FOUR]
    assert len({tuple((form.prompt("?"), form.trace) for form in one) for one in taught}) == 1
    assert not equal(first, begun("prompt=r1_zero", "model.seed=1", "model.cache=null")[0])


def test_a_set_in_a_prompt_that_is_not_taught_is_said():
    """Bug: the accuracy on a set is 0 because the tiny model has never seen its prompt, without a word."""
    words = ["model.cache=null"]
    for prompt in ("question_only", "r1_zero_short"):
        words += [f"+data@eval.sets.of_{prompt}.data=stories", f"+prompt@eval.sets.of_{prompt}.prompt={prompt}"]
    *_, said = begun(*words)
    assert [line[:45] for line in said.splitlines() if line[0] == "!"] == [
        "! eval.sets.of_question_only.prompt=question_"
    ]


def test_a_prompt_of_ones_own_has_a_warm_start_to_itself(tmp_path):
    mine, copy = tmp_path / "mine.prompt", tmp_path / "copy.prompt"
    mine.write_text("Q: {question}\nA:")
    copy.write_text((resource_dir("prompts") / "r1_zero.prompt").read_text())
    (boxed,) = starts.formats_of(settings("prompt=question_only", f"prompt.file={mine}"))
    assert (boxed.prompt("1+1?"), boxed.trace) == ("Q: 1+1?\nA:", starts.shipped("question_only").trace)
    same = starts.formats_of(settings(f"prompt.file={copy}"))  # the same text is the same prompt
    assert len(same) == len(starts.SHARED)
    with pytest.raises(ConfigError, match=r"prompt.reward=question_only .*choose"):  # which never reads these tags
        starts.formats_of(settings("prompt=r1_zero", "prompt.reward=question_only"))


# Where it is found again


@pytest.mark.parametrize("types", some([(("model.weights=bfloat16",),), ((),)], 2))
def test_what_is_found_is_what_would_be_made_also_without_a_cache_and_with_other_threads(tmp_path, types):
    """Else a run goes on with another start model, and is refused."""
    kept = (*types, f"model.cache={tmp_path}")
    words = ((*types, "model.cache=/dev/null/cache"), kept, (*kept, "seed=7"), (*kept, "model.seed=1"))
    torch.set_num_threads(2)
    try:
        alone = begun(*words[0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    first, second, other = (begun(*one) for one in words[1:])
    assert "! model.cache=/dev/null/cache" in alone[2]
    assert [one[1].source for one in (alone, first, second, other)] == ["made", "made", "cache", "made"]
    for one in (first, second):
        assert equal(alone[0], one[0])
        assert (alone[1].weights, alone[1].key) == (one[1].weights, one[1].key)
    assert not equal(alone[0], other[0])


def recipe_for(run) -> tuple[dict, Policy]:
    """(the recipe of a run's start model, its policy without habits)."""
    lessons = read_splits(run.data, print)[0]
    policy = make_policy(run, lessons)
    return starts.recipe_of(run.model, policy, starts.lessons_of(run, run.model, lessons)), policy


@pytest.mark.parametrize(
    ("key", "value", "another"),
    [
        ("model__width", 64, True), ("model__dtype", "bfloat16", True), ("data__n_train", 65, True),
        ("prompt__file", "r1_zero.prompt", True), ("seed", 1, False), ("model__freeze", ["norm"], False),
    ],
)  # fmt: skip
def test_the_key_changes_with_whatever_changes_the_model_and_nothing_else(key, value, another, monkeypatch):
    monkeypatch.setattr(starts, "check_readable", lambda prompt, trace: None)
    run = settings(*QUICK)
    recipe, policy = recipe_for(run)
    before = starts.hashed(recipe), starts.hashed(starts.maker_of(run.model, policy))
    recipe, policy = recipe_for(altered(run, **{key: value}))
    assert ((starts.hashed(recipe), starts.hashed(starts.maker_of(run.model, policy))) != before) == another
    assert {f.name for f in fields(run.model)} <= {*recipe, *starts.ROUNDING, *starts.AFTERWARDS}


# The model that comes with the package


def test_the_default_run_starts_from_what_was_shipped_with_its_recipe(tmp_path):
    recipe, _ = recipe_for(settings())
    found = starts.find_shipped(recipe)
    assert found is not None, "the default start model is another now: python tools/start_model.py"
    assert starts.checksum(found) == json.loads((starts.SHIPPED / "r1_zero_short.json").read_text())["weights"]
    assert starts.find_shipped(recipe | {"seed": 1}) is None
    recipe = json.loads(ship(QUICK, tmp_path).with_suffix(".json").read_text())["recipe"]
    assert starts.find_shipped(recipe, tmp_path) is not None


@pytest.mark.long
@pytest.mark.parametrize("description", sorted(starts.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_model_is_what_the_warm_start_makes(description, tmp_path):
    """Bit by bit where torch and the processor are those that made it."""
    kept = json.loads(description.read_text())
    run = settings_from(kept["made by"].split()[3:])
    policy, recipe, maker = make(run, Console())
    assert json.loads(json.dumps(recipe)) == kept["recipe"]
    assert starts.find_shipped(recipe) is not None
    if {name: value for name, value in maker.items() if name != "code"} == kept["maker"]:
        assert starts.checksum(dict(policy.named_weights())) == kept["weights"]
