"""Settings that nothing reads under the other settings of a run: given all the same, they are refused.

Accepted, such a setting would look like an experiment and change nothing. The table is in `conditions.py`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rlreason.config.any_run import AnyRunConfig
from rlreason.config.conditions import CONDITIONS
from rlreason.config.leaves import leaves, typed_word

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
