"""Choices of options, checked before Hydra composes: `GROUP=OPTION` must name an option that is there.

Hydra would stumble over words that are no texts, such as `loss=1`, and say little of the others.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep

from rlreason.cli.aliases import MAY_BE_ABSENT, NONE, PLACED
from rlreason.cli.launchers import GROUP, PACKAGES
from rlreason.cli.own_options import SETTINGS
from rlreason.cli.suggestions import did_you_mean, nearest_options, options
from rlreason.config.leaves import typed_word
from rlreason.config.sources import resource_dir
from rlreason.errors import ConfigError

PLUGINS = ("hydra/launcher", "hydra/sweeper")
NAMED = ("model", "data", "prompt")  # groups whose options have a name among their settings
SEVERAL = ("experiment", "logger")  # groups of which a run may have several options, as a list


def refuse_wrong_choices(overrides: Sequence[str]) -> None:
    """`ConfigError` where a word chooses what is no option, or takes away what every run needs."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    groups = options()
    for word in overrides:
        try:
            [override] = parser.parse_overrides([word])
        except Exception:  # said where it is composed
            continue
        group = override.key_or_group
        _refuse_mere_name(override, groups, overrides)
        if not group:
            raise ConfigError(f"{word} names no setting in front of the equals sign: write key=value")
        if override.is_hydra_override() and override.is_sweep_override():
            raise ConfigError(f"{word}: Hydra's own settings have one value in all runs: give one, or quote a text")
        if override.is_delete():
            if PLACED.get(override.package or "") != group:
                _refuse_taking_away(override, groups)
        elif group == "sweep" and (override.is_sweep_override() or isinstance(override.value(), list)):
            raise ConfigError(
                f"{word}: one sweep is one name: give one of {', '.join(groups['sweep'])}, and run another by a "
                "command of its own"
            )
        elif isinstance(override.value(), list) and _is_ours(group) and group not in SEVERAL:
            raise ConfigError(f"{word}: a run has one option of {group}: choose one of {', '.join(groups[group])}")
        elif group in SEVERAL and (beside := [one for one in _lists(override) if "none" in one and len(one) > 1]):
            chosen = ",".join(map(str, beside[0]))
            raise ConfigError(f"{group}=[{chosen}] chooses none beside others: leave none out, or write {group}=none")
        elif group.replace(".", "/") in PLUGINS and "." in group and not isinstance(override.value(), dict):
            name = group.replace(".", "/")
            raise ConfigError(f"{word}: {name} is chosen with a slash: choose {name}={_of_hydra(name)[0]}")
        elif group == "hydra.searchpath":
            _refuse_lost_places(override)
        elif (offered := groups.get(group) or _of_hydra(group)) and not isinstance(override.value(), dict):
            _refuse_unknown(override, group, offered)


def _refuse_taking_away(override: Override, groups: dict[str, list[str]]) -> None:
    key = override.key_or_group
    if key.startswith("hydra") or key in MAY_BE_ABSENT:
        return
    if key in groups:
        cure = f"{key}=none" if "none" in groups[key] else f"{key}={groups[key][0]}"
        raise ConfigError(f"~{key} takes away what a run needs: choose an option instead, as in {cure}")
    raise ConfigError(f"~{key}: no setting of a run can be taken away: leave this out, or write {key}=VALUE")


def _refuse_mere_name(override: Override, groups: dict[str, list[str]], words: Sequence[str]) -> None:
    """A name is what records call an option: that of another option would be recorded, and nothing else changed."""
    place, _, last = override.key_or_group.rpartition(".")
    kind = PLACED.get(place, place)
    if last != "name" or kind not in NAMED or override.value_type is None:
        return
    for value in _values(override):
        name = str(value.text if isinstance(value, QuotedString) else value)
        option = name.lower().replace("-", "_")
        other = option in groups[kind] or (kind in SETTINGS and ":" in name)
        chosen = {f"{key}={found}" for key in (place, f"{kind}@{place}") for found in (name, option)}
        if other and not chosen & {word.lstrip("+") for word in words}:
            raise ConfigError(
                f"{override.input_line} changes only what records call the option: choose the option itself, "
                f"{place}={option if option in groups[kind] else name}"
            )


def _refuse_unknown(override: Override, group: str, offered: list[str]) -> None:
    chosen = list(_values(override))
    if not chosen:
        raise ConfigError(f"{override.input_line} chooses no option of {group}: choose one of {', '.join(offered)}")
    for value in chosen:
        name = value.text if isinstance(value, QuotedString) else value
        if isinstance(name, str) and _exists(group, name):
            continue
        shown = typed_word(name)
        axes = ["loss", "baseline"] if group == "objective" and shown not in NONE else []
        elsewhere = [f"{axis}={shown}" for axis in axes if _exists(axis, shown)]
        meant = did_you_mean(elsewhere or nearest_options(shown, offered))
        more = ", or a function of your own as module:function" if group in SETTINGS else ""
        if group == GROUP and shown in PACKAGES:
            raise ConfigError(f"{group}={shown}: its package is missing: pip install 'rlreason[{PACKAGES[shown]}]'")
        if group in PLUGINS:
            more = f", or install the plug-in that brings it (such as pip install hydra-NAME-{group[6:]})"
        key = override.package if PLACED.get(override.package or "") == group else group  # as it was typed
        raise ConfigError(
            f"{key}={shown} is no option of {group}: {f'{meant} ' if meant else ''}"
            f"choose one of {', '.join(offered)}{more}"
        )


def _values(override: Override) -> Iterator[Any]:
    """Each value that a word gives: those of a sweep and those of a list one by one."""
    value = override._value
    if isinstance(value, Glob):
        yield from override.sweep_iterator()
    elif isinstance(value, ChoiceSweep | list):
        for one in value if isinstance(value, list) else value.list:
            yield from one if isinstance(one, list) else [one]
    elif isinstance(value, RangeSweep):
        yield from value.range()
    elif isinstance(value, IntervalSweep):
        yield value.start
    else:
        yield value


def _lists(override: Override) -> list[list[Any]]:
    """The lists that a word gives; of a sweep, each of them."""
    value = override._value
    return [one for one in (value.list if isinstance(value, ChoiceSweep) else [value]) if isinstance(one, list)]


def _is_ours(group: str) -> bool:
    """Whether it is a group of this program, and not one of Hydra's or of the user's."""
    return group in MAY_BE_ABSENT or (resource_dir("conf") / group).is_dir()


def _of_hydra(group: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group) if group.startswith("hydra/") else []


def _refuse_lost_places(override: Override) -> None:
    """Hydra warns of a place that is not there, and goes on without what it would bring in."""
    for place in _values(override):
        path = str(place.text if isinstance(place, QuotedString) else place)
        if not path.startswith("pkg://") and not Path(path.removeprefix("file://")).is_dir():
            raise ConfigError(f"hydra.searchpath={path} is no folder: give a list of folders, or --config-dir DIR")


def _exists(group: str, option: str) -> bool:
    """Whether there is such an option, in a folder of the group too."""
    loader = GlobalHydra.instance().config_loader()
    if option in loader.get_group_options(group):
        return True
    return (
        isinstance(loader, ConfigLoaderImpl) and bool(option) and loader.repository.config_exists(f"{group}/{option}")
    )
