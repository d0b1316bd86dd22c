"""Options of groups: find the user's own, check choices before Hydra composes, and set up launchers."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason.cli.aliases import MAY_BE_ABSENT, NONE, PLACED
from rlreason.cli.mistakes import did_you_mean, nearest_options, options
from rlreason.config.data import of_function
from rlreason.config.groups import names_function
from rlreason.config.leaves import resource_dir, typed_word
from rlreason.config.store import BLOCKS, content, register
from rlreason.errors import ConfigError
from rlreason.objectives.objective import own_loss_config
from rlreason.runtime.machine import usable_processors
from rlreason.runtime.plugins import announced
from rlreason.sweeps.gpus import GpuPlan

SETTINGS = {"loss": own_loss_config, "data": of_function}  # group -> its settings for a function


class Repository(ConfigRepository):
    """Hydra's repository of configs, with the user's options; it lives as long as one command."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._announced = cache(announced)  # reading the metadata of all packages takes 10 ms

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the config at a path, or that of a function; `ConfigError` if the function cannot be used."""
        if (function := self._function(config_path)) is None:
            result = super().load_config(config_path)
            if result and config_path.startswith("sweep/") and isinstance(result.config, DictConfig):
                for block in BLOCKS:
                    result.config.pop(block, None)
            return result
        group, _, option = config_path.partition("/")
        try:
            node = OmegaConf.structured(SETTINGS[group](function))
        except ConfigError as error:
            if option == function:
                raise
            raise ConfigError(
                f"{group}={option}, which an installed package announces, cannot be used: {error}"
            ) from None
        return ConfigResult("rlreason", function, node, {"package": None}, defaults_list=[])

    def sweep_content(self, name: str) -> dict[str, Any]:
        """Return all of a sweep's file, with the blocks that Hydra does not get; `ConfigError` if there is none."""
        path = f"sweep/{name}"
        source = self._find_object_source(path, ObjectType.CONFIG)
        if source is None:
            known = ", ".join(self.get_group_options("sweep"))
            raise ConfigError(f"sweep={name} is no option of sweep: choose one of {known}")
        if source.scheme() == "structured":  # `register` has stored Hydra's part of our own files
            return content(OmegaConf.load(resource_dir("multirun_sweeps") / f"{name}.yaml"))
        return content(source.load_config(path).config)

    def config_exists(self, config_path: str) -> bool:
        """Return whether there is such an option."""
        return self._function(config_path) is not None or super().config_exists(config_path)

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """Return the options of a group, with those of installed packages; a file of the same name wins."""
        has_names = group_name in SETTINGS and results_filter is not ObjectType.GROUP
        names = self._announced(group_name) if has_names else {}
        return sorted({*super().get_group_options(group_name, results_filter), *names})

    def _function(self, config_path: str) -> str | None:
        """Return `module:function`, if an option names one."""
        group, _, option = config_path.partition("/")
        if group not in SETTINGS or super().config_exists(config_path):
            return None
        return option if names_function(option) else self._announced(group).get(option)


_LASTING = (Plugins, SourcesRegistry)  # set once per process, and not changed by composing
_OF_HYDRA = ("hydra", "_dummy_empty_config_.yaml")  # Hydra's own entries in its store of configs


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give Hydra our schemas and resolvers for the block, and no one else's configs."""
    Plugins.instance()  # before the copy: keep what the modules of plug-ins store on import
    stored = ConfigStore.instance().repo
    theirs, resolvers = Singleton._instances, BaseContainer._resolvers
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind in _LASTING}
    BaseContainer._resolvers = dict(resolvers)
    try:
        ConfigStore.instance().repo |= {name: stored[name] for name in _OF_HYDRA}
        register()
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers


GROUP = "hydra/launcher"
BASIC, LOCAL, SLURM, RAY = "basic", "submitit_local", "submitit_slurm", "ray"
HERE = (BASIC, "joblib", LOCAL)  # that start their runs on this machine
PACKAGES = {
    "joblib": "launchers",
    LOCAL: "launchers",
    SLURM: "launchers",
    RAY: "ray",
}  # launcher -> extra that brings it
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit's default is an hour
#: Processors and gigabytes of memory for each GPU of a run, and for a run without one. Slurm's default: one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep.

    `batch`: how many it is given at a time; None: all. `side_by_side`: how many of them it runs at a time.
    `shows_gpus`: False if it hides this machine's GPUs from its jobs. `gpus`: of each run, if the launcher hands them
    out.
    """

    batch: int | None
    side_by_side: int
    shows_gpus: bool
    words: list[str]  # Hydra's overrides that set up the launcher
    gpus: int = 0

    def line(self, launcher: str) -> str:
        """Return what was set for a launcher, for the plan of a sweep.

        >>> Jobs(None, 2, True, ["hydra.launcher.n_jobs=2"]).line("joblib")
        'joblib: n_jobs=2 (hydra.launcher.KEY=VALUE sets another)'
        """
        if launcher == BASIC:
            return ""
        said = [word.removeprefix("hydra.launcher.") for word in self.words]
        said += [f"{self.batch} runs at a time"] if self.batch else []
        said += [f"{self.gpus or 'no'} GPU{'s' * (self.gpus > 1)} a run"] if launcher == RAY else []
        keys = " (hydra.launcher.KEY=VALUE sets another)" if self.words else ""
        return f"{launcher}: {', '.join(said) or 'as it is by itself'}{keys}"


def chosen_launcher(words: Sequence[str]) -> str:
    """Return the launcher that the overrides choose.

    >>> chosen_launcher(["seed=0,1", "hydra/launcher=joblib"]), chosen_launcher(["seed=0"])
    ('joblib', 'basic')
    """
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else BASIC


def set_up(launcher: str, words: Sequence[str], jobs: int | None, runs: int, gpus: GpuPlan | None = None) -> Jobs:
    """Set up a launcher for `runs` runs, `jobs` at a time; None: as many as `gpus` suffice for.

    Without GPUs None means as many as there are processors, and one for this program's own loop. Hydra's overrides on
    the command line (`hydra.launcher.n_jobs=2`, `hydra.sweeper.max_batch_size=2`) take precedence.

    >>> jobs = set_up("joblib", [], 2, 6)
    >>> (jobs.batch, jobs.side_by_side, jobs.words)
    (None, 2, ['hydra.launcher.n_jobs=2'])
    """
    plan = gpus or GpuPlan()
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    width = plan.side_by_side(jobs, runs, 1 if launcher == BASIC else usable_processors())
    batch = int(given["hydra.sweeper.max_batch_size"]) if "hydra.sweeper.max_batch_size" in given else None
    own: dict[str, int] = {}
    each = 0
    if launcher == "joblib":
        n_jobs = int(given.get("hydra.launcher.n_jobs", width))
        width = n_jobs if n_jobs > 0 else usable_processors()
        own["n_jobs"] = width
    elif launcher == LOCAL:  # it starts all its jobs together
        batch = width = batch or width
        own["timeout_min"] = WEEK
    elif launcher in (SLURM, RAY):
        each = plan.of_run(plan.most)
        own |= _of_slurm(each, jobs, given) if launcher == SLURM else {}
        width, batch = max(1, min(jobs or runs, runs)), None
    elif launcher != BASIC:  # probably on other machines
        width, batch = jobs or 1, batch or jobs
    shows = launcher != LOCAL or "hydra.launcher.gpus_per_node" in given
    named = {f"hydra.launcher.{key}": value for key, value in own.items()}
    return Jobs(batch, width, shows, [f"{key}={value}" for key, value in named.items() if key not in given], each)


def _of_slurm(gpus: int, jobs: int | None, given: Collection[str]) -> dict[str, int]:
    """Return what a job of Slurm requests. GPUs requested in another way (gres, gpus_per_task) are not named twice."""
    processors, memory = WITH_GPU if gpus else WITHOUT
    own = {"timeout_min": DAY, "cpus_per_task": processors * max(1, gpus), "mem_gb": memory * max(1, gpus)}
    otherwise = {"gres", "gpus_per_task"} & {key.removeprefix("hydra.launcher.") for key in given}
    own |= {"gpus_per_node": gpus} if gpus and not otherwise else {}
    return own | ({"array_parallelism": jobs} if jobs else {})


def settings_of(hydra: Hydra, config_name: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the settings of the launcher that these overrides choose and set up, for a sweep in a folder."""
    config = hydra.compose_config(
        config_name, _multirun_words(words, folder), run_mode=RunMode.MULTIRUN, with_log_configuration=False
    )
    found = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _multirun_words(words: Sequence[str], folder: Path) -> list[str]:
    return [*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{folder}'"]


def launcher_of(
    hydra: Hydra, config_name: str, words: Sequence[str], folder: Path, task: Callable[[DictConfig], Any]
) -> Callable[[Sequence[tuple[str, Sequence[str]]]], list[Exception | None]]:
    """Return a function that has the chosen launcher run jobs, (name, overrides) each, in their folders below `folder`.

    `words`: the overrides that choose and set it up. The function returns the error of each job, and waits for all.
    """
    here = _multirun_words(words, folder)
    config = hydra.compose_config(config_name, here, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    try:
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={chosen_launcher(words)} cannot be loaded ({error}): install its package") from None
    return _Launch(launcher)


class _Launch:
    """Runs batches, numbered consecutively."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.done = launcher, 0

    def __call__(self, jobs: Sequence[tuple[str, Sequence[str]]]) -> list[Exception | None]:
        overrides = [[*words, f"hydra.sweep.subdir='{name}'"] for name, words in jobs]
        first, self.done = self.done, self.done + len(overrides)
        return [_error(one) for one in self.launcher.launch(overrides, initial_job_idx=first)]


def _error(job: Any) -> Exception | None:
    try:
        _ = job.return_value
    except Exception as error:
        return error
    return None


PLUGINS = ("hydra/launcher", "hydra/sweeper")
NAMED = ("model", "data", "prompt")  # groups whose options have a name among their settings
SEVERAL = ("experiment", "logger")  # groups of which a run may have several options, as a list


def refuse_wrong_choices(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` if a word chooses no existing option, or removes what every run needs."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    groups = options()
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
    return GlobalHydra.instance().config_loader().get_group_options(group) if group.startswith("hydra/") else []


def _refuse_lost_places(override: Override) -> None:
    """Refuse a missing place in the search path, of which Hydra only warns."""
    for place in _values(override):
        path = str(place.text if isinstance(place, QuotedString) else place)
        if not path.startswith("pkg://") and not Path(path.removeprefix("file://")).is_dir():
            raise ConfigError(f"hydra.searchpath={path} is no folder: give a list of folders, or --config-dir DIR")


def _exists(group: str, option: str) -> bool:
    """Return whether there is such an option, also in a folder of the group."""
    loader = GlobalHydra.instance().config_loader()
    if option in loader.get_group_options(group):
        return True
    return (
        isinstance(loader, ConfigLoaderImpl) and bool(option) and loader.repository.config_exists(f"{group}/{option}")
    )
