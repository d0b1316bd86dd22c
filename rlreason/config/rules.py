"""Hold a run to what its fields say and to the rules between them: ranges, choices, what nothing reads."""

from functools import cache
from typing import Any

from rlreason.config.groups import ASKED, JUDGED, OF_TINY
from rlreason.config.leaves import Leaf, leaves, typed_word
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.objectives.objective import LOSS_NUMBERS, readers
from rlreason.settings import Range


def broken_rules(run: AnyRunConfig) -> list[str]:
    """Return the complaints about values and about rules between settings, one line each.

    After the first complaint about a setting, later kinds of rules are silent on it.
    """
    bad: list[str] = []
    for lines in (wrong_values(run), run.problems(), too_many_problems(run) if works_on_a_model(run) else []):
        named = set(map(_setting, bad))
        bad += [line for line in lines if _setting(line) not in named]
    return bad


def _setting(line: str) -> str:
    """Return the last part of a complaint's setting: the rules of the objective know no groups."""
    return line.partition("=")[0].rpartition(".")[2]


def too_many_problems(run: Any, there: int | None = None) -> list[str]:
    """Return complaints about typed requests for more problems than are `there`; what a scale requests is a bound."""
    there = run.problems_there if there is None else there
    return [
        f"{key}={count} is more than the {there} problems there are to ask: set {key}={there}, or null for all of them"
        for key, count in run.bounds().items()
        if key in run.given and there is not None and count is not None and count > there
    ]


def wrong_values(settings: Any, prefix: str = "") -> list[str]:
    """Return complaints about numbers out of range and words that are no choice, one line each.

    >>> from rlreason.config.groups import GradingConfig
    >>> wrong_values(GradingConfig(memory_mb=1), "grading.")
    ['grading.memory_mb=1 must be at least 256: try grading.memory_mb=1536']
    """
    bad = []
    for leaf in leaves(settings, prefix):
        bounds: Range | None = leaf.metadata.get("range")
        words = leaf.metadata.get("choices")
        if bounds is not None:
            members = leaf.value if isinstance(leaf.value, list) else [leaf.value]
            numbers = [n for n in members if isinstance(n, int | float) and not isinstance(n, bool)]
            default = "give such a number" if leaf.default == "???" else f"try {leaf.key}={typed_word(leaf.default)}"
            if rule := next(filter(None, map(bounds.broken_by, numbers)), ""):
                bad.append(f"{leaf.key}={typed_word(leaf.value):.40} {rule}: {bounds.cure or default}")
        elif words is not None and leaf.value is not None and leaf.value not in words:  # null is left to the type
            bad.append(f"{leaf.key}={leaf.value} is none of {', '.join(words)}: {leaf.metadata['cure']}")
    return bad


# When a setting is read


def unread_keys(run: AnyRunConfig) -> dict[str, str]:
    """Return the settings that nothing reads in this run, set or not, and when each of them is read."""
    return {leaf.key: where for leaf in leaves(run) if (where := unread(leaf, run))}


def complaints(run: AnyRunConfig) -> dict[str, str]:
    """Return setting -> complaint for those that were typed, to another value than their class's, and nothing reads."""
    return {
        leaf.key: f"{leaf.key}={typed_word(leaf.value)} has no effect: it is read {where}: leave it out, or choose that"
        for leaf in leaves(run)
        if leaf.key in run.given and leaf.value != leaf.default and (where := unread(leaf, run))
    }


_compiled: Any = cache(compile)


def unread(leaf: Leaf, run: Any) -> str:
    """Return where a setting would be read, if nothing in this run reads it; else ""."""
    for condition, here in leaf.conditions:
        code = _compiled(condition, "only_if", "eval")
        names = {name: getattr(run, name) for name in code.co_names if hasattr(run, name)}
        if not eval(code, {"__builtins__": {}, "__name__": __name__}, names | {"here": here}):
            return words_of(condition, leaf.key.rpartition(".")[0])
    return ""


def words_of(condition: str, group: str) -> str:
    """Return where a setting of the group is read.

    >>> words_of("here.steps > 0", "model.warm_start")
    'only where model.warm_start.steps > 0'
    """
    plain = condition.replace("trains or", "the run trains or").replace("here.", f"{group}.").replace("'", "")
    plain = plain.replace(" == ", "=").replace(" is None", "=null").replace("None", "null")
    return WORDS.get(condition, f"only where {plain}").format(group=group)


_OF_PROMPT = "by algorithms that train, and where eval.prompt is null, only (else: eval.prompt)"
_OF_DATA = "by algorithms that train, and where eval.data is null, only (else: eval.data)"
#: Conditions that are not their own best words: where a setting is read.
WORDS: dict[str, str] = {
    "trains": "by algorithms that train only",
    "samples_to_learn": "where responses are sampled to learn from only, and algorithm=sft samples none",
    "here is data": "for training data only",
    "reads_data": _OF_DATA,
    "here is not data or trains or eval.data is None": _OF_DATA,
    "trains_on(here)": "for training data only (eval_problems limits evaluations; split=train asks it)",
    "reads_traces": "by algorithm=sft and by data.filter=correct on training data only",
    "imitates(here)": "by algorithm=sft, data.filter=correct, and a warm start for this prompt alone only",
    "warms_up": "by the warm start of model=tiny only",
    "verifies(here)": "without a prompt.reward=module:function only",
    "compares_ground_truths(here)": "by the built-in comparison only, not where a function judges",
    "here is data or here.n_validation is not None": "to learn from, and with eval.data.n_validation, only",
    "here.holds_out": "with {group}.n_validation=200 {group}.validation=null only",
    "here.on_hub": "for a data set of the hub only, not for files",
    ASKED: _OF_PROMPT,
    ASKED + OF_TINY: _OF_PROMPT,
    JUDGED + OF_TINY: "to learn from samples, and without eval.prompt, only",
    "compares_answers": "by the built-in comparison only, not where prompt.reward or data.verifier judges",
    "has_own_reward": "by prompt.reward=module:function only",
    "reads_eval_samples": "where neither samples nor n_list says how many only",
    "problem_limit is None": "where eval_problems is null only",
    "on_several_ranks": "with gpus=2 or more only",
    "here.shares_gpu": "where vLLM shares the policy's GPU only (rollout.placement=colocate)",
    "not old_from_engine": "without rollout.async_level only, with which every weight would be exactly 1",
    "here.side_is_open": "for a side that is null only",
    **{
        f"here.reads('{key}')": f"by {' or '.join(losses)} only"
        for key in LOSS_NUMBERS
        if (losses := [f"loss={name}" for name in readers(key)])
    },
    "converses": "by strategy=refine and strategy=hybrid only",
    "False": "by a sweep only (-m)",
}
