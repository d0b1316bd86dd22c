"""Names and values of the courses' handouts, of papers and of discovery, and what stands for them here (names.yaml).

They are applied to `key=value` before it is parsed: to each value of a list, of a sweep, or of a function of Hydra's
grammar, as in `use_std_normalization=choice(True,False)`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.cli.flags import OWN_CONFIGS, options_by_group
from rlreason.errors import ConfigError
from rlreason.objectives.objective import LOSS_NUMBERS
from rlreason.runtime.plugins import announced

TABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text("utf-8"))
NAMES: dict[str, str] = TABLES["names"] | {number: f"loss.{number}" for number in ("cliprange", *LOSS_NUMBERS)}
HABITS = {theirs: ours.split() for names, ours in TABLES["habits"].items() for theirs in names.split()}
NONE = ("false", "no", "off", "null", "none", "~")  # YAML's words for nothing: the option `none`, where a group has it
MAY_BE_ABSENT = ("experiment", "sweep")  # groups without which a run is whole
#: Keys that hold an option of a group in another place -> that group: typed as any setting, they stand for Hydra's own
#: spelling (eval.prompt=r1_zero for prompt@eval.prompt=r1_zero).
PLACED = {"eval.prompt": "prompt", "eval.data": "data"}
SETS, OF_SET = "eval.sets", re.compile(r"eval\.sets\.[\w-]+\.(prompt|data)")  # of more validation sets: added
NO_SETS = f"{SETS}=null"
#: A handout's setting that has no counterpart: vLLM's share of the GPU. Its memory is planned in GB here.
GPU_SHARE = "gpu_memory_utilization"
AUTO, MAX_SEEDS = "seed=auto", "max_seeds="

WORD = re.compile(r"([~+]*)([^=]*)(=?)(.*)", re.DOTALL)
TOKEN = re.compile(r"""(['"]?)([^\s,()\[\]{}'"=]++)\1(?!\()""")  # one value, with its quotes; no function's name
Note = Callable[[str], object]


def translated(words: Sequence[str], note: Note = print, algorithm: str = "") -> list[str]:
    """Return the overrides under our names and options; `note` is called once per name with our name.

    `algorithm`: of the run whose settings are changed. Hydra must be ready to compose.
    """
    discovers = OWN_CONFIGS.keys() & {algorithm, *(word.lower().partition("algorithm=")[2] for word in words)}
    names: dict[str, str] = NAMES | (TABLES["of_discovery"] if discovers else {})
    groups, typed, notes, found = options_by_group(), dict[str, str](), dict[str, str](), list[str]()
    for word in (one for typed_word in words for one in sets_in(typed_word)):
        sign, key, equals, value = WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        if key == GPU_SHARE:
            notes[key] = f"{key} is not read here: rollout.kv_cache_gb=GB sets the size of vLLM's cache"
            continue
        ours, now = names.get(key, key), value
        if typed.setdefault(ours, key) != key:  # only the later value would count
            raise ConfigError(f"{typed[ours]} and {key} both set {ours}: leave one of them out")
        if of_set := OF_SET.fullmatch(ours):
            sign = sign or "+"
        group = of_set[1] if of_set else PLACED.get(ours, ours.partition("@")[0])
        if equals and value.lower() in NONE and (ours in PLACED or ours in MAY_BE_ABSENT):  # Hydra has no word for that
            found += [f"~{group}@{ours}"] if ours in PLACED else []
            continue
        if equals and (accepted := TABLES["values"].get(key)):
            if value.startswith("[") or any(fold(token[2]) not in accepted for token in TOKEN.finditer(value)):
                raise ConfigError(f"{word} is none of {', '.join(accepted)}: choose one")
            now = _spelt(value, accepted)
        elif equals and (options := groups.get(group)):
            nothing = dict.fromkeys(NONE, "none") if "none" in options else {}
            now = _spelt(value, {fold(one): one for one in options} | TABLES["options"].get(group, {}) | nothing)
        elif equals and key.endswith("reward") and (rewards := announced(key)):
            now = TOKEN.sub(lambda token: rewards.get(token[2], token[0]), value)
        if ours != key:
            notes[key] = f"{word} is {ours}={now} here"
        place = f"{group}@{ours}" if of_set or ours in PLACED else ours
        found.append(f"{sign}{place}{equals}{now}")
    if NO_SETS in found and (more := [word for word in found if f"{SETS}." in word]):
        raise ConfigError(f"{SETS}=[] drops all sets, and {more[0].lstrip('+')} names one: leave one of them out")
    for text in notes.values():
        note(f"note: {text}")
    return found


def sets_in(word: str) -> list[str]:
    """Return the words that `eval.sets=[...]` is short for: the data of a set for each; any other word as it is.

    A function's set has the name of the function. An empty list drops those that a file gives.

    >>> sets_in("eval.sets=[gsm8k,my_tasks:sums]")
    ['eval.sets.gsm8k.data=gsm8k', 'eval.sets.sums.data=my_tasks:sums']
    """
    key, _, value = word.partition("=")
    if key != SETS:
        return [word]
    if "{" in value:
        raise ConfigError(f"{word}: name each setting by itself, as {SETS}.NAME.data=gsm8k {SETS}.NAME.samples=4")
    values = [] if value.lower() in NONE else re.findall(r"[^\s,\[\]'\"]+", value)
    if not values:
        return [NO_SETS]
    sets = [f"{SETS}.{data.rpartition(':')[2]}.data={data}" for data in values]
    if len({one.partition("=")[0] for one in sets}) < len(sets):
        raise ConfigError(f"{word} has one name twice: leave one out, or name it yourself, as {SETS}.NAME.data=gsm8k")
    return sets


def sweep_options_spelt(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Spell the options of a sweep as settings of our sweeper; `ConfigError` for a wrong one, and outside a sweep.

    >>> sweep_options_spelt(["seed=0,1", "jobs=2", "carry=a,b=c,d=e", "sweep_name=x=1"], multirun=True)
    ['seed=0,1', 'hydra.sweeper.jobs=2', "hydra.sweeper.carry=['a,b=c,d=e']", "hydra.sweeper.sweep_name='x=1'"]
    >>> sweep_options_spelt(["max_seeds=8", "seed=AUTO", "max_seeds=4"], multirun=True)
    ['hydra.sweeper.max_seeds=8', 'seed=0,1,2,3', 'hydra.sweeper.max_seeds=4']
    """
    spelt, options = list[str](), TABLES["sweep_options"]
    overrides = [AUTO if word.lower() == AUTO else word for word in overrides]
    limit = next((word for word in reversed(overrides) if word.startswith(MAX_SEEDS)), "")
    if AUTO in overrides and not limit:
        overrides = [*overrides, limit := f"{MAX_SEEDS}8"]
    if limit and AUTO not in overrides:
        raise ConfigError(f"{limit} is for {AUTO}, which adds seeds where they decide: give both, or leave it out")
    if AUTO in overrides and (seeds := [word for word in overrides if word.startswith("seed=") and word != AUTO]):
        raise ConfigError(f"{AUTO} {seeds[0]}: seeds are added by looks, or typed: leave one of them out")
    for word in overrides:
        if word == AUTO and multirun:  # runs of all these seeds are designed, and begun only where they decide
            most = limit.removeprefix(MAX_SEEDS)
            spelt.append(f"seed={','.join(map(str, range(int(most) if most.isdigit() else 1)))}")
            continue
        key, equals, typed = word.lstrip("+").partition("=")
        if word != AUTO and (not equals or key not in options):
            spelt.append(word)
            continue
        if not multirun:
            raise ConfigError(f"{word} is for a sweep: add -m, or leave it out")
        value, (pattern, rule) = "null" if typed == "auto" else re.sub(r"['\"]", "", typed), options[key]
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"{word} is refused: {key} takes {rule}: give such a value, or leave it out")
        if key == "carry":
            value = str(re.split(r", *(?![^,]*=)", value.strip("[]")))
        elif key == "sweep_name":
            value = repr(value)
        spelt.append(f"hydra.sweeper.{key}={value}")
    return spelt


def fold(option: str) -> str:
    """Return a name without the characters that are ignored.

    >>> fold("GRPO-No-Clip"), fold("Qwen3-0.6B") == fold("qwen3_0_6b")
    ('grponoclip', True)
    """
    return re.sub(r"[-_. ]", "", option.lower())


def _spelt(value: str, spellings: Mapping[str, str]) -> str:
    """Replace each value that has such a spelling, ignoring case, hyphens and dots."""
    return TOKEN.sub(lambda token: spellings.get(fold(token[2]), token[0]), value)
