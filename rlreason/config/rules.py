"""Hold a run to what its fields say and to the rules between them: ranges, choices, what nothing reads."""

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlreason.config.leaves import Leaf, leaves, typed_word
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.objectives.objective import LOSS_NUMBERS, readers
from rlreason.settings import Range

#: Fields that name the chosen option of a group; a group without any of them has no option files.
NAMING = ("name", "kind", "loss_type", "engine", "__class__")


def unread_keys(run: AnyRunConfig) -> dict[str, str]:
    """Return the settings that nothing reads in this run, set or not, and when each of them is read."""
    return {leaf.key: found[0] for leaf in leaves(run) if (found := unread(leaf, run))}


def complaints(run: AnyRunConfig, conf: Path) -> dict[str, str]:
    """Return setting -> complaint for those that were set and that nothing reads.

    `conf` is the folder of option files. Set means: a value other than that of the dataclass, the chosen option of the
    group and the scales. An option describes a prompt or a data set for every algorithm, so what it sets is no mistake
    of the user's.
    """
    found: dict[str, str] = {}
    for leaf in leaves(run):
        if leaf.value == leaf.default or not (reader := unread(leaf, run)):
            continue
        if leaf.value not in option_values(run, leaf.key, conf):
            where, cure = reader
            found[leaf.key] = f"{leaf.key}={typed_word(leaf.value)} has no effect: it is read {where}: {cure}"
    return found


def option_values(run: AnyRunConfig, key: str, conf: Path) -> list[Any]:
    """Return the values of the key in the chosen option of its group, and in the options that this builds on."""
    group, _, rest = key.partition(".")
    homes, kinds = (conf, *_own_option_folders()), ("scale", f"scale/{run.algorithm}", "eval", "experiment")
    whole = [_option(file) for home in homes for kind in kinds for file in sorted((home / kind).glob("*.yaml"))]
    values = [OmegaConf.select(option, name) for option in whole for name in (key, key.removeprefix("eval."))]
    if not rest:
        return values
    settings = getattr(run, group)
    if group == "eval" and "." in rest and rest.partition(".")[0] in ("prompt", "data"):  # use their options
        group, _, rest = rest.partition(".")
        settings = getattr(settings, group)
    naming = next(word for word in NAMING if hasattr(settings, word))
    name = getattr(settings, naming)
    files = [file for home in homes for file in sorted((home / group).glob("*.yaml"))]
    options = {file.stem: _option(file) for file in files}
    chosen = [stem for stem, option in options.items() if option.get(naming) == name]
    for stem in chosen:  # grows during the loop
        values.append(OmegaConf.select(options[stem], rest))
        chosen += [base for base in options[stem].get("defaults") or [] if base in options and base not in chosen]
    return values


@cache  # called for every run of a sweep
def _option(file: Path) -> Any:
    return OmegaConf.load(file)


def _own_option_folders() -> list[Path]:
    """List folders with the user's own options (--config-dir)."""
    from hydra.core.global_hydra import GlobalHydra  # the grader, which needs ranges alone, loads no hydra

    hydra = GlobalHydra.instance()
    if not hydra.is_initialized():
        return []
    elements = hydra.config_loader().get_search_path().get_path()
    return [Path(e.path.removeprefix("file://")) for e in elements if e.path and e.path.startswith("file://")]


def broken_rules(run: AnyRunConfig, conf: Path, of_sweep: bool = False) -> list[str]:
    """Return all complaints, one line each. `conf` is the folder of option files.

    In a run `of_sweep` a setting may serve the other runs, so unread settings are allowed.

    The kinds of rules go from plain to subtle: after the first complaint about a setting, later kinds are silent on it.
    """
    bad: list[str] = []
    too_many = too_many_problems(run, run.problems_there, conf)
    for lines in (wrong_values(run), run.problems(), too_many, [] if of_sweep else complaints(run, conf).values()):
        named = set(map(_setting, bad))
        bad += [line for line in lines if _setting(line) not in named]
    return bad


def too_many_problems(run: AnyRunConfig, there: int | None, conf: Path) -> list[str]:
    """Return complaints about requests for more than `there` problems; a scale's number is an upper bound."""
    return [
        f"{key}={count} is more than the {there} problems there are to ask: set {key}={there}, or null for all of them"
        for key, count in run.bounds().items()
        if there is not None and count is not None and count > there and count not in option_values(run, key, conf)
    ]


def smaller_last_evaluation(run: AnyRunConfig) -> list[str]:
    """Return a complaint if the last evaluation has fewer problems than those before it were set to.

    Call it only if `interim_eval_problems` was typed: a scale's is an upper bound and allowed.
    """
    if not works_on_a_model(run):
        return []
    asked, last = run.bounds().get("interim_eval_problems"), run.eval.final_problems
    if asked is None or last is None or asked <= last:
        return []
    return [
        f"eval.final_problems={last} is less than interim_eval_problems={asked}, all of which it asks again: raise it, "
        "or lower interim_eval_problems"
    ]


def _setting(line: str) -> str:
    """Return the last part of a complaint's setting: the rules of the objective know no groups."""
    return line.partition("=")[0].rpartition(".")[2]


def wrong_values(settings: Any, prefix: str = "") -> list[str]:
    """Return complaints about numbers out of range and words that are no choice, one line each.

    >>> from rlreason.config.groups import GradingConfig
    >>> wrong_values(GradingConfig(memory_mb=1), "grading.")
    ['grading.memory_mb=1 must be at least 256: try grading.memory_mb=1536']
    """
    found = (_out_of_range(leaf) or _no_choice(leaf) for leaf in leaves(settings, prefix))
    return [line for line in found if line]


def _out_of_range(leaf: Leaf) -> str:
    """Return the complaint about a number, or about a list that holds one."""
    bounds: Range | None = leaf.metadata.get("range")
    members = leaf.value if isinstance(leaf.value, list) else [leaf.value]
    numbers = [n for n in members if isinstance(n, int | float) and not isinstance(n, bool)]
    rule = next((rule for number in numbers if bounds and (rule := bounds.broken_by(number))), "")
    if not rule or bounds is None:
        return ""
    cure = bounds.cure
    if rule == "must be finite":
        cure = "give a number"
    elif not cure and leaf.default != "???":
        cure = f"try {leaf.key}={typed_word(leaf.default)}"
    value = typed_word(leaf.value)
    short = value if len(value) <= 40 else f"{value[:20]}...({len(value)} digits)"
    return f"{leaf.key}={short} {rule}" + (f": {cure}" if cure else "")


def _no_choice(leaf: Leaf) -> str:
    """Return the complaint about a word that is none of the choices. null is left to the type."""
    words = leaf.metadata.get("choices")
    if words is None or leaf.value is None or leaf.value in words:
        return ""
    return f"{leaf.key}={leaf.value} is none of {', '.join(words)}: {leaf.metadata['cure']}"


# When a setting is read


def unread(leaf: Leaf, run: Any) -> tuple[str, str] | None:
    """Return where a setting would be read, and the cure, if nothing in this run reads it."""
    for condition, here in leaf.conditions:
        if not eval(_compiled(condition), {"__builtins__": {}, "__name__": __name__}, _Names(run, here)):
            return words_of(condition, leaf.key.rpartition(".")[0])
    return None


def words_of(condition: str, group: str) -> tuple[str, str]:
    """Return where a setting of the group is read, and the cure where it is not.

    >>> words_of("here.steps > 0", "model.warm_start")
    ('only where model.warm_start.steps > 0', 'leave it out')
    """
    plain = condition.replace("here.", f"{group}.").replace("'", "").replace(" == ", "=").replace("None", "null")
    where, cure = WORDS.get(condition, (f"only where {plain}", ""))
    return where.format(group=group), cure.format(group=group) or "leave it out"


class _Names(dict[str, Any]):
    """What a condition may name: `here`, and the attributes of the run."""

    def __init__(self, run: Any, here: Any) -> None:
        super().__init__(here=here)
        self.run = run

    def __missing__(self, name: str) -> Any:
        return getattr(self.run, name)


@cache
def _compiled(condition: str) -> Any:
    return compile(condition, "only_if", "eval")


_ASKED = "by algorithms that train, and where eval.prompt is null, only"
_UNDER_EVAL = "set it under eval.prompt"
#: Conditions that are not their own best words: where a setting is read, and a better cure than leaving it out.
WORDS: dict[str, tuple[str, str]] = {
    "trains": ("by algorithms that train only", ""),
    "samples_to_learn": ("where responses are sampled to learn from only, and algorithm=sft samples none", ""),
    "here is data": ("for training data only", "set it under data, or leave it out"),
    "reads_data": ("by algorithms that train, and where eval.data is null, only", "set it under eval.data"),
    "names_data(here)": ("by algorithms that train, and where eval.data is null, only", ""),
    "trains_on(here)": ("for training data only", "leave it out (eval_problems says how many), or set split=train"),
    "here.pass_rates is not None": ("together with data.pass_rates only", "give data.pass_rates=FILE, or leave it out"),
    "reads_traces": ("by algorithm=sft and by data.filter=correct on training data only", ""),
    "imitates(here)": (
        "by algorithm=sft, by data.filter=correct on training data and by a warm start for this prompt alone only",
        "",
    ),
    "warms_up": ("by the warm start of a model made on the spot only", "leave it out, or choose model=tiny"),
    "verifies(here)": ("without a prompt.reward=module:function only", ""),
    "compares_ground_truths(here)": ("by the built-in comparison only, not where a function judges", ""),
    "here is data or here.n_validation is not None": ("to learn from, and with eval.data.n_validation, only", ""),
    "here.holds_out": (
        "with {group}.n_validation only",
        "set {group}.n_validation=200 {group}.validation=null, or leave it out",
    ),
    "here.on_hub": ("for a data set of the hub only, not for files", "set it to null"),
    "here.path is None": ("where problems are made up only", "leave it out, or set {group}.path=null"),
    "reads_prompt(here)": (_ASKED, _UNDER_EVAL),
    "reads_prompt(here) or model.made_on_the_spot": (_ASKED, _UNDER_EVAL),
    "judges_by(here) or model.made_on_the_spot": (
        "where responses are sampled to learn from, and where eval.prompt is null, only",
        _UNDER_EVAL,
    ),
    "here.chat": ("with a chat template only", "choose {group}=chat, or leave it out"),
    **{
        f"trains or eval.sampling.{key} is None": (
            f"by algorithms that train, and where eval.sampling.{key} is null, only",
            "set one of them",
        )
        for key in ("temperature", "min_tokens", "max_tokens")
    },
    "compares_answers": ("by the built-in comparison only, not where prompt.reward or data.verifier judges", ""),
    "has_own_reward": ("by a reward of your own only", "leave it out, or set prompt.reward=module:function"),
    "reads_eval_samples": ("where neither samples nor n_list says how many only", "set samples, or leave it out"),
    "problem_limit is None": ("where eval_problems is null only", "set eval_problems=null, or leave it out"),
    "on_several_ranks": ("where several ranks train only", "set gpus=2, or leave it out"),
    "here.engine == 'vllm'": ("by rollout=vllm only", "choose it too, or leave this out"),
    "here.engine == 'hf'": ("by rollout=hf only", "choose it too, or leave this out"),
    "here.shares_gpu": ("where vLLM shares the policy's GPU only (rollout.placement=colocate)", ""),
    "here.wandb": ("by logger=wandb only", "choose it too, or leave this out"),
    "here.wandb or here.trackio": ("by logger=wandb and logger=trackio only", "choose one too, or leave this out"),
    "here.rank > 0": (
        "with model.lora.rank above 0 only, and rank 0 trains every weight",
        "set model.lora.rank=8, or leave it out",
    ),
    "here.kind == 'constant'": ("by length_norm=constant only", "set it to null, or choose length_norm=constant"),
    "std_norm != 'none'": ("by what std_norm divides by only", "leave it out, or choose std_norm=group_std"),
    "kl_placement != 'none'": ("with a KL term only", "leave it out, or set kl_placement=loss kl_coef=0.01"),
    "overlong == 'penalty'": ("by overlong=penalty only", "set it to null, or overlong=penalty"),
    "not old_from_engine": (
        "where the trainer scores samples only; with rollout.async_level=1 a loss's ratio starts from the engine's "
        "log-probabilities, so every weight would be exactly 1",
        "",
    ),
    "mismatch != 'none'": ("with mismatch=truncate or mismatch=mask only", "set it to null, or mismatch=truncate"),
    "here.side_is_open": ("for a side that is null only", "set the two sides, or set both to null"),
    **{
        f"here.reads('{key}')": (f"by {' and '.join(losses)} only", f"choose {' or '.join(losses)}")
        for key in LOSS_NUMBERS
        if (losses := [f"loss={name}" for name in readers(key)])
    },
    "asks_side_by_side": ("by strategy=best_of_n and strategy=hybrid only", ""),
    "converses": ("by strategy=refine and strategy=hybrid only", ""),
    "False": ("by a sweep only", "start a sweep with -m, or leave it out"),
}
