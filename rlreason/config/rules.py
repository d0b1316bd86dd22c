"""All rules of a run in one list: ranges, choices, rules between settings, and settings that nothing reads."""

from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rlreason.config.fields import unread, wrong_values
from rlreason.config.leaves import leaves, typed_word
from rlreason.config.run import AnyRunConfig, works_on_a_model

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
        if leaf.value == leaf.default or not (told := unread(leaf, run)):
            continue
        if leaf.value not in option_values(run, leaf.key, conf):
            where, cure = told
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
    asked = too_many_problems(run, run.problems_there, conf)
    for lines in (wrong_values(run), run.problems(), asked, [] if of_sweep else complaints(run, conf).values()):
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
