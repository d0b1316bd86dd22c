"""Read what each option file sets and its purpose, and translate the overrides of `algorithm=discover`."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep
from omegaconf import OmegaConf

from rlreason.cli.aliases import MAY_BE_ABSENT, NONE, PLACED
from rlreason.cli.flags import OWN_CONFIGS, config_exists, group_options
from rlreason.cli.mistakes import did_you_mean, nearest_options, options_by_group
from rlreason.config.leaves import resource_dir, typed_word
from rlreason.config.rules import NAMING
from rlreason.config.store import FUNCTIONS, SCHEMAS
from rlreason.errors import ConfigError
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.processes import GpuPlan


class Option(NamedTuple):
    """One option of a group."""

    name: str
    about: str
    sets: dict[str, dict[str, Any]]  # {key: value} under "", and by algorithm where it says more for some
    schema: str  # that its settings are of; empty where the group has one for all options


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted keys.

    >>> flat({"a": {"b": 1}, "c": None}, "x.")
    {'x.a.b': 1, 'x.c': None}
    """
    if not isinstance(settings, dict):
        return {prefix.removesuffix("."): settings}
    return {key: value for name, child in settings.items() for key, value in flat(child, f"{prefix}{name}.").items()}


@cache
def options() -> dict[str, list[Option]]:
    """Return every group that a user chooses from, with the options that come with the package."""
    groups = [path for path in sorted(resource_dir("conf").iterdir()) if path.is_dir()]
    folders = {folder.name: folder for folder in groups}
    folders["sweep"] = resource_dir("multirun_sweeps")
    return {group: [_read(file, group) for file in sorted(path.glob("*.yaml"))] for group, path in folders.items()}


def _read(file: Path, group: str) -> Option:
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("# @package")]
    comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    own = {name: own for name in SCHEMAS["schema"] if (own := file.parent / name / file.name).is_file()}
    sets = {name: _sets(path, group) for name, path in {"": file, **own}.items()}
    schema = sets[""].pop("schema", "")
    return Option(file.stem, comment, sets, schema)


def _sets(file: Path, group: str) -> dict[str, Any]:
    """Return what a file sets, including other options that it chooses, as typed; and its schema, as `schema`."""
    whole = group == "sweep" or file.read_text("utf-8").startswith("# @package _global_")
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    found: dict[str, Any] = {}
    for item in content.pop("defaults", ()):
        for place, option in item.items() if isinstance(item, dict) else []:
            if place.startswith("override "):
                group_of, _, package = place.removeprefix("override /").partition("@")
                found[package.removeprefix("_global_.") or group_of] = option
        if not whole and str(item).startswith("/schema/"):
            found["schema"] = item.partition("@")[0].rpartition("/")[2]
    grid = content.pop("hydra", {}).get("sweeper", {}).get("params", {})
    found |= flat(content, "" if whole else f"{group}.") | grid
    named = (group, *(f"{group}.{word}" for word in NAMING))  # by which the chosen option is known again
    return {key: value for key, value in found.items() if key not in named or value != file.stem}


#: Short names, and the courses', for settings that have another meaning or none in other algorithms.
NAMES = {
    "model": "client.model",
    "base_url": "client.base_url",
    "temperature": "client.temperature",
    "max_tokens": "client.max_tokens",
    "enable_thinking": "client.thinking",
    "thinking": "client.thinking",
    "timeout": "score.timeout_s",
}
#: Groups of options that only algorithms with a model of their own have.
OF_MODELS = (
    "experiment", "data", "scale", "loss", "objective", "prompt", "rollout", "eval", "logger", "baseline", "std_norm",
    "length_norm", "off_policy",
)  # fmt: skip


def own_names(words: Sequence[str], note: Callable[[str], object] = print, algorithm: str = "") -> list[str]:
    """Return the words with discovery's names of settings if it is chosen; `ConfigError` with others next to it.

    >>> own_names(["algorithm=discover", "model=Qwen/Qwen3-32B"], note=lambda line: None)
    ['algorithm=discover', 'client.model=Qwen/Qwen3-32B']
    >>> own_names(["algorithm=grpo", "model=tiny"])
    ['algorithm=grpo', 'model=tiny']
    """
    chosen = [word.partition("=")[2].lower().split(",") for word in words if word.startswith("algorithm=")]
    names = {name.strip() for values in chosen for name in values}
    if not (names | {algorithm}) & OWN_CONFIGS.keys():
        return list(words)
    if len(names) > 1:
        raise ConfigError(
            f"algorithm={','.join(sorted(names))}: discover shares no settings with the others: give it a command of "
            "its own"
        )
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in OF_MODELS:
            raise ConfigError(
                f"{word} belongs to algorithms that work on a model here, and algorithm=discover asks one elsewhere "
                "(client.base_url, client.model): leave it out"
            )
        if ours := NAMES.get(key):
            note(f"note: {key} is {ours} here")
        found.append(f"{ours or key}{equals}{value}")
    return found


GROUP = "hydra/launcher"
PROCESSES, JOBLIB, LOCAL, SLURM = "processes", "joblib", "submitit_local", "submitit_slurm"
HERE = (PROCESSES, JOBLIB, LOCAL)  # that start their runs on this machine
OF_EXTRA = (JOBLIB, LOCAL, SLURM)  # launchers that the extra `launchers` brings
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit's default is an hour
TIMEOUTS = 10  # times that a job of Slurm is queued again when its time is over: its run resumes
#: Processors and gigabytes of memory for each GPU of a run, and for a run without one. Slurm's default: one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep.

    `batch`: how many it is given at a time; None: all. `side_by_side`: how many of them it runs at a time.
    """

    batch: int | None
    side_by_side: int
    words: list[str]  # Hydra's overrides that set up the launcher

    def line(self, launcher: str) -> str:
        """Return what was set for a launcher, for the plan of a sweep.

        >>> Jobs(None, 2, ["hydra.launcher.n_jobs=2"]).line("joblib")
        'joblib: n_jobs=2 (hydra.launcher.KEY=VALUE sets another)'
        """
        if launcher == PROCESSES:
            return ""
        said = [word.removeprefix("hydra.launcher.") for word in self.words]
        said += [f"{self.batch} runs at a time"] if self.batch else []
        keys = " (hydra.launcher.KEY=VALUE sets another)" if self.words else ""
        return f"{launcher}: {', '.join(said) or 'as it is by itself'}{keys}"


def chosen_launcher(words: Sequence[str]) -> str:
    """Return the launcher that the overrides choose.

    >>> chosen_launcher(["seed=0,1", "hydra/launcher=joblib"]), chosen_launcher(["seed=0"])
    ('joblib', 'processes')
    """
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else PROCESSES


def set_up(launcher: str, words: Sequence[str], jobs: int | None, runs: int, gpus: GpuPlan | None = None) -> Jobs:
    """Set up a launcher for `runs` runs, `jobs` at a time; None: as many as `gpus` suffice for.

    Where it hands out none, None means one; without any GPU, another launcher than ours takes as many as there are
    processors. Overrides on the command line (`hydra.launcher.n_jobs=2`) take precedence.

    >>> set_up("joblib", [], 2, 6)
    Jobs(batch=None, side_by_side=2, words=['hydra.launcher.n_jobs=2'])
    """
    plan = gpus or GpuPlan()
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    width = plan.side_by_side(jobs, runs, 1 if launcher == PROCESSES or plan.names else usable_processors())
    batch, own = None, dict[str, object]()
    if launcher == PROCESSES:
        own = {"jobs": width, "gpus": list(plan.handed_out)}
    elif launcher == JOBLIB:
        n_jobs = int(given.get("hydra.launcher.n_jobs", width))
        width = n_jobs if n_jobs > 0 else usable_processors()
        own["n_jobs"] = width
    elif launcher == LOCAL:  # it starts all its jobs together, and hides the GPUs from them unless told how many
        batch = width
        own["timeout_min"] = WEEK
        if plan.names:
            own["gpus_per_node"] = len(plan.names)
    elif launcher == SLURM:
        width = max(1, min(jobs or runs, runs))
        own = _of_slurm(plan.of_run(plan.most), jobs, given)
    else:
        width = jobs or 1
    named = {f"hydra.launcher.{key}": value for key, value in own.items()}
    return Jobs(batch, width, [f"{key}={value}" for key, value in named.items() if key not in given])


def _of_slurm(gpus: int, jobs: int | None, given: Collection[str]) -> dict[str, object]:
    """Return what a job of Slurm requests. GPUs requested in another way (gres, gpus_per_task) are not named twice."""
    processors, memory = WITH_GPU if gpus else WITHOUT
    own: dict[str, object] = {"timeout_min": DAY, "max_num_timeout": TIMEOUTS}
    own |= {"cpus_per_task": processors * max(1, gpus), "mem_gb": memory * max(1, gpus)}
    otherwise = {"gres", "gpus_per_task"} & {key.removeprefix("hydra.launcher.") for key in given}
    own |= {"gpus_per_node": gpus} if gpus and not otherwise else {}
    return own | ({"array_parallelism": jobs} if jobs else {})


PLUGINS = ("hydra/launcher", "hydra/sweeper")
NAMED = ("model", "data", "prompt")  # groups whose options have a name among their settings
SEVERAL = ("experiment", "logger")  # groups of which a run may have several options, as a list


def refuse_wrong_choices(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` if a word chooses no existing option, or removes what every run needs."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    groups = options_by_group()
    for word in overrides:
        try:
            [override] = parser.parse_overrides([word])
        except Exception:  # reported when it is composed
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
    """Refuse to set an option's name to that of another option: it would be recorded, and nothing else changed."""
    place, _, last = override.key_or_group.rpartition(".")
    kind = PLACED.get(place, place)
    if last != "name" or kind not in NAMED or override.value_type is None:
        return
    for value in _values(override):
        name = str(value.text if isinstance(value, QuotedString) else value)
        option = name.lower().replace("-", "_")
        other = option in groups[kind] or (kind in FUNCTIONS and ":" in name)
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
        more = ", or a function of your own as module:function" if group in FUNCTIONS else ""
        if group == GROUP and shown in OF_EXTRA:
            raise ConfigError(f"{group}={shown}: its package is missing: pip install 'rlreason[launchers]'")
        if group in PLUGINS:
            more = f", or install the plug-in that brings it (such as pip install hydra-NAME-{group[6:]})"
        key = override.package if PLACED.get(override.package or "") == group else group  # as it was typed
        raise ConfigError(
            f"{key}={shown} is no option of {group}: {f'{meant} ' if meant else ''}"
            f"choose one of {', '.join(offered)}{more}"
        )


def _values(override: Override) -> Iterator[Any]:
    """Return each value of an override: those of a sweep and those of a list one by one."""
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
    """Return the lists of an override; for a sweep, each of them."""
    value = override._value
    return [one for one in (value.list if isinstance(value, ChoiceSweep) else [value]) if isinstance(one, list)]


def _is_ours(group: str) -> bool:
    """Return whether a group is this program's, not Hydra's or the user's."""
    return group in MAY_BE_ABSENT or (resource_dir("conf") / group).is_dir()


def _of_hydra(group: str) -> list[str]:
    return group_options(group) if group.startswith("hydra/") else []


def _refuse_lost_places(override: Override) -> None:
    """Refuse a missing place in the search path, of which Hydra only warns."""
    for place in _values(override):
        path = str(place.text if isinstance(place, QuotedString) else place)
        if not path.startswith("pkg://") and not Path(path.removeprefix("file://")).is_dir():
            raise ConfigError(f"hydra.searchpath={path} is no folder: give a list of folders, or --config-dir DIR")


def _exists(group: str, option: str) -> bool:
    """Return whether there is such an option, also in a folder of the group."""
    return option in group_options(group) or (bool(option) and config_exists(f"{group}/{option}"))
