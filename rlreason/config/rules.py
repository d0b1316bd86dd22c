"""Every rule of a run in one list: ranges, choices, rules between settings, and settings that nothing reads."""

from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rlreason.config.conditions import CONDITIONS
from rlreason.config.fields import out_of_range, wrong_words
from rlreason.config.leaves import leaves, typed_word
from rlreason.config.run import AnyRunConfig, works_on_a_model

#: By what the chosen option of a group is known again; a group without such a word has no option files.
NAMING = ("name", "kind", "loss_type", "engine", "__class__")


def unread_keys(run: AnyRunConfig) -> dict[str, str]:
    """The settings that nothing reads in this run, given or not, and where each of them is read."""
    own, found = {leaf.key for leaf in leaves(run)}, dict[str, str]()
    for condition in CONDITIONS:
        present = own.intersection(condition.keys)
        if present and not condition.read(run):
            found |= dict.fromkeys(present - found.keys(), condition.where)
    return found


def complaints(run: AnyRunConfig, conf: Path) -> dict[str, str]:
    """Setting -> what is wrong with it: of those that were given and that nothing reads.

    `conf` is the folder of option files. Given means: another value than the dataclass, the chosen option of the group
    and the scales have. An option describes a prompt or a data set for every algorithm, so what it sets is no mistake
    of whoever chose it.
    """
    found: dict[str, str] = {}
    settings = {leaf.key: leaf for leaf in leaves(run) if leaf.value != leaf.default}
    for condition in CONDITIONS:
        given = [key for key in condition.keys if key in settings and key not in found]
        if not given or condition.read(run):
            continue
        for key in given:
            if settings[key].value not in of_options(run, key, conf):
                spelled = f"{key}={typed_word(settings[key].value)}"
                found[key] = f"{spelled} has no effect: it is read {condition.where}: {condition.cure}"
    return found


def of_options(run: AnyRunConfig, key: str, conf: Path) -> list[Any]:
    """What the chosen option of the key's group, known by its name, gives it; and the options that it builds on."""
    group, _, rest = key.partition(".")
    homes, kinds = (conf, *_own_option_folders()), ("scale", f"scale/{run.algorithm}", "eval", "experiment")
    whole = [_option(file) for home in homes for kind in kinds for file in sorted((home / kind).glob("*.yaml"))]
    values = [OmegaConf.select(option, name) for option in whole for name in (key, key.removeprefix("eval."))]
    if not rest:
        return values
    settings = getattr(run, group)
    if group == "eval" and "." in rest and rest.partition(".")[0] in ("prompt", "data"):  # options of those groups
        group, _, rest = rest.partition(".")
        settings = getattr(settings, group)
    naming = next(word for word in NAMING if hasattr(settings, word))
    name = getattr(settings, naming)
    files = [file for home in homes for file in sorted((home / group).glob("*.yaml"))]
    options = {file.stem: _option(file) for file in files}
    chosen = [stem for stem, option in options.items() if option.get(naming) == name]
    for stem in chosen:  # grows while it is walked
        values.append(OmegaConf.select(options[stem], rest))
        chosen += [base for base in options[stem].get("defaults") or [] if base in options and base not in chosen]
    return values


@cache  # every run of a sweep is checked
def _option(file: Path) -> Any:
    return OmegaConf.load(file)


def _own_option_folders() -> list[Path]:
    """Folders with options of the user's own (--config-dir)."""
    hydra = GlobalHydra.instance()
    if not hydra.is_initialized():
        return []
    elements = hydra.config_loader().get_search_path().get_path()
    return [Path(e.path.removeprefix("file://")) for e in elements if e.path and e.path.startswith("file://")]


def broken_rules(run: AnyRunConfig, conf: Path, of_sweep: bool = False) -> list[str]:
    """Complaints in one line each. `conf` is the folder of option files.

    In a run `of_sweep` a setting may be there for the sake of the other runs, so nobody minds that nothing reads it.

    The kinds of rules go from plain to subtle: of a setting that one kind complains about, the later say no more.
    """
    bad: list[str] = []
    sizes = out_of_range((leaf.key, leaf.value) for leaf in leaves(run))
    asked = too_many_asked(run, run.problems_there, conf)
    for lines in (sizes, wrong_words(run), run.problems(), asked, [] if of_sweep else complaints(run, conf).values()):
        named = set(map(_setting, bad))
        bad += [line for line in lines if _setting(line) not in named]
    return bad


def too_many_asked(run: AnyRunConfig, there: int | None, conf: Path) -> list[str]:
    """Complaints about more problems than `there` are: what a scale asks for is an upper bound and no mistake."""
    return [
        f"{key}={count} is more than the {there} problems there are to ask: set {key}={there}, or null for all of them"
        for key, count in run.bounds().items()
        if there is not None and count is not None and count > there and count not in of_options(run, key, conf)
    ]


def lowered(run: AnyRunConfig) -> list[str]:
    """A complaint where the last evaluation asks fewer problems than those before it were set to ask.

    Only for who knows that `interim_eval_problems` was typed: a scale's is an upper bound and no mistake.
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
    """What a complaint is about, by its last name: the rules of the objective know no groups."""
    return line.partition("=")[0].rpartition(".")[2]
