"""Hold a run to what its fields say and to the rules between them: ranges, choices, what nothing reads."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.leaves import Leaf, leaves, typed_word
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.objective import LOSS_NUMBERS
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
            numbers = [n for n in members if isinstance(n, int | float)]
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
#: Conditions that are not their own best words -> where a setting is read.
WORDS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("conditions.yaml").read_text(encoding="utf-8"))
for _number in LOSS_NUMBERS:
    _losses = " or ".join(f"loss={name}" for name, loss in LOSSES.items() if _number in loss.numbers)
    WORDS[f"here.reads('{_number}')"] = f"by {_losses} only"


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
