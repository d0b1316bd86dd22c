"""Read folders of runs and sweeps, finished or not, into one `Study`; what is broken in them is named in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, STATUS
from rlreason.records.reader import runs_in
from rlreason.report.chosen import flattered, picked
from rlreason.report.question import question_of
from rlreason.report.read_run import Say, read_run
from rlreason.report.study import Run, Setting, Study, labels_of
from rlreason.runtime.text import few
from rlreason.sweeps.before import SAME_FIGURES
from rlreason.sweeps.design import Key
from rlreason.sweeps.outcomes import purposes
from rlreason.sweeps.state import FILE, RunState, SweepState, read_state

#: Settings that tell runs apart without making two settings of them.
NO_SETTING = (*SAME_FIGURES, "seed", "eval_every", "save_model", "profile", "monitors", "hydra")
MOST_KEYS = 4  # in which loose runs differ: with more, they are told apart by the names of their folders


@dataclass(slots=True)
class Given:
    """What one argument stands for: runs, and the sweep that they belong to, if any."""

    path: Path
    runs: list[Run]
    state: SweepState | None = None
    part: bool = False  # a setting of that sweep, not all of it
    problems: list[str] = field(default_factory=list)  # what was broken
    picked: int = 0  # of how many settings of its sweep this one was the best, and may have been given for that


def read_study(folders: Sequence[Path], say: Callable[[str], None] | None = None) -> Study:
    """One study of everything given: runs, sweeps, settings of sweeps (SWEEP/KEY=VALUE).

    `say` gets a line for whatever is broken, which stands in `Study.problems` too. `ConfigError` where nothing was
    found at all.
    """
    return study_of([read_given(folder, say) for folder in folders])


def read_given(path: Path, say: Callable[[str], None] | None = None) -> Given:
    """The runs that one argument stands for; `ConfigError` where it is none of what is understood."""
    problems: list[str] = []

    def note(text: str) -> None:
        if text not in problems:
            problems.append(text)
            if say is not None:
                say(text)

    if not path.is_dir():
        return _setting_of_a_sweep(path, note, problems)
    if (path / CONFIG).exists() or ((path / STATUS).exists() and not runs_in(path)):
        return Given(path, [read_run(path, (), None, _state_in_sweep(path), note)], problems=problems)
    if (path / FILE).exists() or runs_in(path):
        state = read_state(path, note)
        return Given(path, _runs_of(path, state, note), state, problems=problems)
    if inner := sorted(file.parent.name for file in path.glob(f"*/{FILE}")):
        raise ConfigError(
            f"RUNS={path} holds the sweeps {few(inner)}: give one of them, as each asks a question of its own"
        )
    raise ConfigError(f"RUNS={path} holds no run: give the folder of a run or of a sweep, as printed at its start")


def _state_in_sweep(path: Path) -> RunState | None:
    """What the sweep beside a run knows of it."""
    if not (path.parent / FILE).exists():
        return None
    try:
        return read_state(path.parent, lambda _: None).run(path.name)
    except (ConfigError, KeyError):
        return None


def _runs_of(path: Path, state: SweepState, note: Say) -> list[Run]:
    return [read_run(path / run.name, run.key, run.seed, run, note) for run in state.runs]


def _setting_of_a_sweep(path: Path, note: Say, problems: list[str]) -> Given:
    """SWEEP/KEY=VALUE,...: the runs of a sweep whose names hold all these parts, whatever their seeds."""
    sweep, asked = path.parent, set(path.name.split(","))
    if "=" in path.name and sweep.is_dir() and ((sweep / FILE).exists() or runs_in(sweep)):
        state = read_state(sweep, note)
        everyone = state.runs
        state.runs = [run for run in everyone if asked <= set(run.name.split(","))]
        if state.runs:
            of = picked(state.runs, everyone)
            return Given(path, _runs_of(sweep, state, note), state, part=True, problems=problems, picked=of)
        names = [run.name for run in everyone]
        raise ConfigError(f"RUNS={path}: no run of {sweep} has {path.name}: its runs are {few(names, 3)}")
    what = "is no folder" if path.exists() else "is not there"
    raise ConfigError(f"RUNS={path} {what}: give the folder of a run or of a sweep, as printed at its start")


def study_of(given: Sequence[Given]) -> Study:
    """One study of what was given: its settings are told apart by what was swept, or by what differs in their configs.

    The reference is that of the first sweep given whole, else the first setting given.
    """
    first = given[0]
    whole = [one for one in given if one.state is not None]
    if len(given) == 1 and first.state is not None:
        groups = _by_key(first.runs)
    elif whole and len(whole) == len(given) and _one_sweep(whole):
        groups = _by_key([run for one in given for run in one.runs])
    else:
        groups = _by_config([run for one in given for run in one.runs])
    settings = settings_of_groups(groups)
    state = first.state
    axes = list(dict.fromkeys(key for setting in settings for key, _ in setting.key))
    name = state.name if state is not None else first.path.resolve().name
    sweep = state.asked if state is not None else str(first.runs[0].provenance.get("sweep", "")) if first.runs else ""
    study = Study(
        name,
        question_of(sweep if state is not None else sweep or name, axes),
        axes,
        settings,
        on_purpose=list(purposes(state.axes)) if state is not None and _one_sweep(given) else [],
        problems=list(dict.fromkeys(line for one in given for line in one.problems)),
        notes=[flattered(one.path.name, one.picked) for one in given if one.picked],
        carried=[one for each in whole if each.state for one in each.state.carried],
        command=state.command if state is not None else "",
        folders=[one.path for one in given],
    )
    if not study.runs:
        raise ConfigError(f"RUNS={first.path} holds no run: give the folder of a run or of a sweep")
    for one in given:
        for setting in settings:
            if one.picked and one.runs[0] in setting.runs:
                setting.best_of = one.picked
    _put_reference_first(study, None if first.part else state)
    label_all(study.settings)
    _name_twins(study)
    return study


def _one_sweep(given: Sequence[Given]) -> bool:
    """Whether everything given is of one sweep."""
    return len({one.path.parent if one.part else one.path for one in given}) == 1 and all(one.state for one in given)


def settings_of_groups(groups: Mapping[Key, list[Run]]) -> list[Setting]:
    """Settings with their runs by seed; `label_all` names them, once it is known which is the reference."""
    return [Setting(key, "", sorted(runs, key=lambda run: run.seed)) for key, runs in groups.items()]


def label_all(settings: Sequence[Setting]) -> None:
    """Give the settings, the reference first, short names."""
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label


def _by_key(runs: Sequence[Run]) -> dict[Key, list[Run]]:
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def _by_config(runs: Sequence[Run]) -> dict[Key, list[Run]]:
    """Runs by what differs between their configs; of one config and one seed, by their folders."""
    differing = differing_keys([run.settings for run in runs if run.settings])
    if len(differing) > MOST_KEYS:
        return _by_name(runs)
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        key = tuple((name, _word(run.settings.get(name))) for name in differing) if run.settings else ()
        groups.setdefault(key or run.setting, []).append(run)
    if any(len({run.seed for run in of}) < len(of) for of in groups.values()):  # the same twice
        return _by_name(runs)
    return _given_keys(groups)


def _by_name(runs: Sequence[Run]) -> dict[Key, list[Run]]:
    """Runs by the names of their folders without the seed, and by the folders around them where those are equal."""
    of_name: dict[Key, list[Run]] = {}
    for run in runs:
        parts = [part for part in run.name.split(",") if not part.startswith("seed=")]
        of_name.setdefault((("run", ",".join(parts) or run.folder.parent.name),), []).append(run)
    groups: dict[Key, list[Run]] = {}
    for (pair,), of in of_name.items():
        places = {run.folder.parent for run in of}
        for run in of:
            place = f"{run.folder.parent.name}/" * (len(places) > 1)
            groups.setdefault((("run", f"{place}{pair[1]}"),), []).append(run)
    return _given_keys(groups)


def _given_keys(groups: dict[Key, list[Run]]) -> dict[Key, list[Run]]:
    for key, of in groups.items():
        for run in of:
            run.setting = key
    return groups


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which configs differ, but for the seed and what changes no figure.

    >>> differing_keys([{"seed": 0, "lr": 1, "n": 2, "threads": 1}, {"seed": 1, "lr": 1, "n": 3, "threads": 2}])
    ['n']
    """
    names = dict.fromkeys(name for config in configs for name in config)
    return [
        name
        for name in names
        if not any(name == skip or name.startswith(f"{skip}.") for skip in NO_SETTING)
        and len({_word(config.get(name)) for config in configs}) > 1
    ]


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def _put_reference_first(study: Study, state: SweepState | None) -> None:
    """The sweep's reference, which may name fewer keys than a setting has, goes first; without one the first does."""
    named = state.reference if state is not None else None
    if named is None:
        return
    fitting = [one for one in study.settings if dict(one.key) == named]
    fitting = fitting or [one for one in study.settings if named.items() <= dict(one.key).items()]
    if len(fitting) != 1:
        study.notes.append(
            f"{'Several settings have' if fitting else 'No setting is'} the sweep's reference "
            f"({' '.join(f'{key}={value}' for key, value in named.items())}): the first one stands for it."
        )
    if fitting:
        study.settings.sort(key=lambda one: one is not fitting[0])


def _name_twins(study: Study) -> None:
    """Two runs of one setting and seed: the first counts, and the others are named."""
    for setting in study.settings:
        seen: dict[int, Run] = {}
        for run in list(setting.runs):
            if run.seed in seen:
                study.problems.append(
                    f"{run.folder} is left out: {seen[run.seed].folder} has the same setting and seed {run.seed}"
                )
                setting.runs.remove(run)
            else:
                seen[run.seed] = run
