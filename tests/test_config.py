"""Every option composes, every sweep can start, every number has a range, a wrong word is one line."""

import functools
import itertools
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hydra import compose, initialize_config_dir

from rlreason.config.leaves import leaves, resource_dir
from rlreason.config.rules import WORDS, broken_rules
from rlreason.config.store import SCHEMAS, typed
from rlreason.objectives.advantages import BASELINES, STD_NORMS
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.published import NAMED, with_axes_of
from rlreason.training.progress import interim_due
from tests.run_settings import altered
from tests.some import some

CONF = resource_dir("conf")
GROUPS = sorted({p.name for p in CONF.iterdir() if p.is_dir()} - {"experiment", "objective"})  # which have their own
SWEEPS = sorted(p.stem for p in resource_dir("multirun_sweeps").glob("*.yaml"))


def is_named(run, name: str) -> bool:
    """Whether a run has every axis of a named objective, and the numbers of its loss."""
    made = with_axes_of(run, NAMED[name])
    return replace(made, loss=run.loss) == run and run.loss.numbers() == made.loss.numbers()


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def words_with(group: str, option: str, folder: Path) -> list[str]:
    """Return overrides with an option and with what it needs, such as data in a `folder`."""
    words = [f"{group}={option}"]
    files = ("gsm8k", "math", "tulu_math", "jsonl", "paper")  # the last asks for longer responses than tiny can hold
    if (group == "model" and option != "tiny") or option in (*files, "leaderboard", "chat"):
        words.append(f"data.path={folder}")
    if option in (*files, "countdown", "reasoning_gym", "leaderboard", "chat"):
        words += ["model=smollm2_135m", *(["micro_batch_tokens=8192"] if option == "leaderboard" else [])]
    if option == "reasoning_gym":
        words.append("data.task=leg_counting")
    if (group, option) == ("baseline", "none"):
        words += ["std_norm=none", "loss=no_baseline"]
    if option in ("local", "hub"):
        words.append(f"model.path={folder}")
    return words


@pytest.fixture(scope="module")
def usual() -> tuple[Any, dict[str, str]]:
    """The run of no words, and its option of each group."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        choices = compose("config", return_hydra_config=True).hydra.runtime.choices
        return typed(compose("config")), {group: option for group, option in choices.items() if group in GROUPS}


#: Groups whose options go together: the first of each is composed in one run, then the second of each.
TOGETHER = [["algorithm"], ["baseline", "eval", "model", "prompt"]]
TOGETHER += [["data", *(group for group in GROUPS if group not in itertools.chain(*TOGETHER, ["data"]))]]


@pytest.mark.parametrize("groups", TOGETHER, ids=" ".join)
def test_every_option_composes(composed, gsm8k, groups):
    """Bug: an option that cannot be composed, or that is of another algorithm."""
    (gsm8k / "config.json").write_text("{}")  # a model of the user's own
    for chosen in itertools.zip_longest(*map(options, groups)):
        pairs = [(group, option) for group, option in zip(groups, chosen, strict=True) if option]
        run = typed(composed(*dict.fromkeys(word for pair in pairs for word in words_with(*pair, gsm8k))))
        assert type(run) is SCHEMAS["schema"][chosen[0] if groups == ["algorithm"] else "grpo"]


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_every_option_keeps_the_rules_and_is_like_no_other(composed, usual, gsm8k, group):
    """Bug: an option that breaks a rule, or that is another one by a second name."""
    (gsm8k / "config.json").write_text("{}")  # a model of the user's own
    run, chosen = usual
    others = [option for option in options(group) if option != chosen.get(group)]
    runs = {option: typed(composed(*words_with(group, option, gsm8k))) for option in others}
    runs |= {chosen[group]: run} if group in chosen else {}
    pairs = itertools.combinations([option for option in runs if option != "auto"], 2)  # which is one of the others
    assert [pair for pair in pairs if runs[pair[0]] == runs[pair[1]]] == []


def test_the_option_files_are_the_tables_of_the_formulas(composed, usual):
    """Bug: a formula without an option, or an option with another paper's numbers."""
    tables = {"length_norm": AGGREGATIONS, "std_norm": STD_NORMS, "baseline": BASELINES}
    tables |= {"loss": {*LOSSES, "grpo_clip_higher", "gspo_2026"}, "objective": {*NAMED, "custom"}}
    for group, names in tables.items():
        assert options(group) == sorted(names)
    assert [pair for pair in itertools.combinations(NAMED, 2) if NAMED[pair[0]] == NAMED[pair[1]]] == []
    for loss, high in (("gspo", 4e-4), ("gspo_2026", 3e-4)):  # the paper's range, and the course's
        assert typed(composed(f"loss={loss}")).loss.numbers() == {"cliprange_low": 3e-4, "cliprange_high": high}
    for sizes, rows in (({"gradient_accumulation_steps": 8}, 32), ({"micro_batch_size": 16}, 16), ({}, None)):
        assert altered(usual[0], **sizes).sequences_per_micro_batch() == rows


def test_a_named_objective_sets_its_axes_under_any_file_and_any_axis_can_be_overridden_on_top(composed, gsm8k):
    """Bug: an objective that misses one of its axes, or wins over what was typed; an ablation of objectives under a
    course's settings or in a sweep, which put another objective back.
    """
    files = [f"experiment={p.stem}" for p in (CONF / "experiment").glob("*.yaml")]
    files += [f"sweep={sweep}" for sweep in SWEEPS if sweep.startswith("grpo")]
    assert len(files) >= len(NAMED)
    for name, file in zip(itertools.cycle(NAMED), files, strict=False):
        data = [f"data.path={gsm8k}"] if file.startswith("experiment") and "stories" not in file else []
        run = typed(composed(f"objective={name}", file, *data, "length_norm=masked_mean", "entropy_coef=1e-4"))
        assert (run.length_norm.kind, run.entropy_coef) == ("masked_mean", 1e-4)
        assert is_named(replace(run, length_norm=NAMED[name].length_norm, entropy_coef=0.0), name), (name, file)


@pytest.mark.parametrize(
    ("experiment", "model", "data", "prompt", "longest"),
    [
        ("cs336_2025", "Qwen/Qwen2.5-Math-1.5B", "math", "r1_zero", 1024),
        ("cs336_2026", "allenai/OLMo-2-0425-1B", "gsm8k", "question_boxed", 512),
        ("pku_hw3", "Qwen/Qwen3-0.6B", "gsm8k", "r1_zero", 1024),
    ],
)
def test_an_experiment_is_its_handout(composed, gsm8k, experiment, model, data, prompt, longest):
    """Bug: a default that changes moves the numbers of a course."""
    path = f"data.path={gsm8k}"
    run = typed(composed(f"experiment={experiment}", path))
    assert (run.model.path, run.data.name, run.prompt.name, run.sampling.max_tokens) == (model, data, prompt, longest)
    assert (run.n_steps, run.learning_rate, run.advantage_eps, run.kl_coef) == (200, 1e-5, 1e-6, 0.0)
    assert (run.rollout_batch_size, run.group_size, run.train_batch_size, run.epochs_per_rollout) == (256, 8, 256, 1)
    assert (run.sampling.temperature, run.sampling.min_tokens, run.lr_schedule) == (1.0, 4, "constant")
    assert (run.weight_decay, list(run.adam_betas), run.max_grad_norm) == (0.0, [0.9, 0.95], 1.0)
    axes = run.loss.loss_type, run.length_norm.kind, run.std_norm, run.baseline
    assert axes == ("reinforce_with_baseline", "masked_mean", "group_std", "mean")
    assert (run.problems_on_the_way, run.eval_problems) == (1024, None)  # on the way, and the whole split at the end
    every, without = run.eval_every, run.longest_without_evaluation
    assert [s for s in range(1, 201) if interim_due(s, 200, every, without)] == list(range(10, 201, 10))
    other = typed(composed(f"experiment={experiment}", path, "algorithm=ei"))
    assert all(getattr(other, group) == getattr(run, group) for group in ("model", "data", "prompt", "sampling"))


CLOUD = "model=smollm2_135m"
#: Words that compose, and between them have every setting there is.
RUNS = {
    "clip": ["loss=grpo_clip", "loss.dual_clip=3", "overlong=penalty", "length_norm=constant", "kl_placement=loss",
             "kl_coef=0.1", "mismatch=truncate", "mismatch_cap=2", "max_resampling_rounds=1", "rollout=vllm"],
    "ei": ["algorithm=ei"],
    "sft": ["algorithm=sft", CLOUD, "model.lora.rank=8", "data.n_validation=9", "data.validation=null"],
    "best_of_n": ["algorithm=best_of_n"],
    "countdown": [CLOUD, "data=countdown"],
    "gym": [CLOUD, "data=reasoning_gym", "data.task=gcd"],
}  # fmt: skip
EXTREMES = (0, -1, 1, 10**9 + 1, 2**63, 10**20)
FRACTIONS = (0.0, -1.0, 1.0, 1e-320, 0.5, 1.5, 1e20, 1e308, math.nan, math.inf, -math.inf)


def numbers_of(settings: Any, prefix: str = "") -> dict[str, set[type]]:
    """Key -> kinds of numbers that it takes, of every setting that takes any."""
    hints, found = get_type_hints(type(settings)), dict[str, set[type]]()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            found |= numbers_of(value, f"{prefix}{field.name}.")
        elif kinds := {int, float} & {hints[field.name], *get_args(hints[field.name])}:
            found[f"{prefix}{field.name}"] = kinds
    return found


def test_every_number_has_a_range():
    """Bug: a number that nothing bounds, and that ends a run somewhere inside torch."""
    for group, nodes in SCHEMAS.items():
        prefix = "" if group == "schema" else f"{group.removeprefix('schema/')}."
        for node in nodes.values():
            ranged = {leaf.key for leaf in leaves(node(), prefix) if "range" in leaf.metadata}
            assert sorted(numbers_of(node(), prefix).keys() - ranged) == [], "say number(...) on these fields"


def test_words_are_of_conditions_that_fields_have():
    """Bug: a condition that has changed leaves its words behind under the former one."""
    found = [leaf for nodes in SCHEMAS.values() for node in nodes.values() for leaf in leaves(node())]
    assert WORDS.keys() <= {condition for leaf in found for condition, _ in leaf.conditions}


@pytest.mark.parametrize("name", some(RUNS, 5))
def test_an_extreme_value_is_accepted_or_one_line(composed, gsm8k, name):
    """Bug: a number that is not finite or too large passes, or has two lines, or a rule that fails on it."""
    run = typed(composed(*RUNS[name], *([f"data.path={gsm8k}"] if name == "sft" else [])))
    ranges = {leaf.key: leaf.metadata.get("range") for leaf in leaves(run)}
    for key, kinds in numbers_of(run).items():
        *path, last = key.split(".")
        holder = functools.reduce(getattr, path, run)
        before = getattr(holder, last)
        for number in FRACTIONS if float in kinds else EXTREMES:
            setattr(holder, last, [number, 0.9] if isinstance(before, list) else number)
            bad, out = broken_rules(run), ranges[key].broken_by(number)
            about = [line for line in bad if line.startswith((f"{key}=", f"{last}="))]
            assert not out or (len(about) == 1 and out in about[0]), (key, number, bad)
            held = math.isfinite(number) if isinstance(number, float) else abs(number) < 2**63
            assert held or out, (key, number)
        setattr(holder, last, before)
    assert broken_rules(run) == []
