"""Decide what a finished sweep hands on to the next, and which settings of a running sweep can no longer win."""

import difflib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.records.reader import RunFolder
from rlreason.runtime.differences import LEVEL, PROBLEMS, Difference, compared, holm, points, sentence, settling
from rlreason.runtime.intervals import Floats
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few
from rlreason.sweeps.closing import (
    CHOOSING,
    COMPARING,
    Outcomes,
    common_problems,
    correctness,
    mean_of,
    outcomes_of,
    refuse_unequal,
)
from rlreason.sweeps.state import (
    FEWEST_SEEDS,
    FILE,
    SWEEPS,
    Key,
    RunState,
    Setting,
    SweepState,
    read_state,
    sweeps_named,
)

BEST = 3  # settings of a broad sweep that a focused one runs again, besides the reference
GIVE = "give carry= a sweep that has finished"


@dataclass(frozen=True, slots=True)
class Carried:
    """The setting that a sweep hands on.

    `difference`: best setting minus reference, on the problems that chose it; `apart`: the same on the other problems.
    Both are None where the reference is the best setting.
    """

    sweep: str  # its folder
    words: list[str]  # the best setting, as typed; none where the default is kept
    kept_default: bool
    setting: Setting  # the best
    reference: Setting
    means: dict[str, float]  # setting -> mean accuracy over its seeds, on the problems that choose
    difference: Difference | None
    adjusted_p: float | None  # of `difference`, by Holm
    apart: Difference | None
    sentence: str
    model: str = ""  # that it was chosen with

    def plain(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return asdict(self)


def sweep_folder(word: str, model: str = "", data: str = "") -> Path:
    """Return the folder that `carry=` names: a path, or below runs/sweeps a folder of this name or with this `sweep=`.

    Of several, prefer the same model and data, then a finished sweep, then the exact name, then the newest.
    `ConfigError` where there is none.
    """
    if word and Path(word).is_dir():
        return Path(word)
    named = [SWEEPS / word] if word and (SWEEPS / word).is_dir() else []

    def nearness(folder: Path) -> tuple[bool, bool, bool, bool, float]:
        try:
            runs = read_state(folder, lambda _: None).runs
            first = next((folder / run.name for run in runs if (folder / run.name / CONFIG).exists()), None)
            setting = RunFolder(first).setting if first is not None else lambda _: None
        except ConfigError:  # `carry` reports what is wrong, if there is no other
            return False, False, False, folder in named, 0.0
        whole = all(run.of_its_own for run in runs)
        same = model_of(setting) == model, setting("data.name") == data
        return *same, whole, folder in named, (folder / FILE).stat().st_mtime if (folder / FILE).exists() else 0.0

    if folders := list(dict.fromkeys([*named, *sweeps_named(SWEEPS, word)])):
        return max(folders, key=nearness)
    names = sorted({path.name for path in SWEEPS.glob("*") if path.is_dir()})
    near = difflib.get_close_matches(word, names, n=1)
    there = f"did you mean carry={near[0]}?" if near else f"{SWEEPS} holds {few(names) or 'none'}"
    raise ConfigError(f"carry={word} is no sweep that has run: {there} (or give a sweep's folder)")


def carry(folder: Path) -> Carried:
    """Return what the finished sweep in a folder hands on.

    `ConfigError` if it is unfinished, has failed runs, names no reference, or measured its settings with different
    protocols or on different problems.
    """
    state = read_state(folder)
    reference, grouped, varied = _measured(state, folder)
    everyone = [one for of_setting in grouped.values() for one in of_setting]
    problems = {half: common_problems(everyone, half) for half in (CHOOSING, COMPARING)}
    right = {half: {key: correctness(of, problems[half]) for key, of in grouped.items()} for half in problems}
    carried = choose_setting(right[CHOOSING], right[COMPARING], reference, folder)
    sentences = [carried.sentence, *_caveats(state, folder, varied, [one.name for one in everyone])]
    model = model_of(RunFolder(folder / everyone[0].name).setting)
    return replace(carried, sentence="; ".join(sentences), model=model)


def best_arms(folder: Path) -> list[Setting]:
    """Return the reference of a finished sweep and its best other settings (at most BEST) on the problems that choose.

    Settings whose runs all diverged are left out. `ConfigError` as in `carry`.
    """
    reference, grouped, _ = _measured(read_state(folder), folder)
    problems = common_problems([one for of_setting in grouped.values() for one in of_setting], CHOOSING)
    others = [key for key, of in grouped.items() if key != reference and any(one.right is not None for one in of)]
    others.sort(key=lambda key: mean_of(correctness(grouped[key], problems)), reverse=True)
    return [dict(key) for key in (reference, *others[:BEST])]


def _measured(state: SweepState, folder: Path) -> tuple[Key, dict[Key, list[Outcomes]], list[str]]:
    """Return a finished sweep's reference, each setting's outcomes, and the parts of the protocol that it varies."""
    if bad := [run for run in state.runs if not run.of_its_own]:
        names = few([f"{run.name}: {run.status_text}" for run in bad], 3)
        again = f" ({state.command})" if state.command else ""
        raise ConfigError(
            f"carry={folder} has not finished: {len(bad)} of its {len(state.runs)} runs did not come to their end "
            f"({names}): type that sweep again{again}, which goes on with them"
        )
    refuse_shared_time(state.runs)
    reference = _reference(state, folder)
    grouped: dict[Key, list[Outcomes]] = {}
    for run in state.runs:
        if (outcomes := outcomes_of(folder, run)) is not None:  # None: its setting was stopped
            grouped.setdefault(run.key, []).append(outcomes)
    if reference not in grouped:
        raise ConfigError(f"carry={folder}: no run of its reference {setting_text(dict(reference))} has ended: {GIVE}")
    return reference, grouped, refuse_unequal([one for of in grouped.values() for one in of], state.axes)


def model_of(setting: Callable[[str], Any]) -> str:
    """Return the model of a run as text; `setting` looks up a key of its config."""
    name, path = setting("model.name"), setting("model.path")
    return f"{name} ({path})" if path else str(name)


def refuse_other_model(carried: Sequence[Carried], model: str) -> None:
    """Raise `ConfigError` if a winner was chosen with another model: good learning rates differ by a factor of 100."""
    for one in carried:
        if one.words and one.model != model:
            raise ConfigError(
                f"carry={one.sweep} was chosen with model {one.model}, and this sweep has {model}: run that sweep with "
                f"this model first, or type what is to be taken over ({' '.join(one.words)}) instead of carry="
            )


def choose_setting(
    choosing: Mapping[Key, Mapping[int, Floats]],
    comparing: Mapping[Key, Mapping[int, Floats]],
    reference: Key,
    folder: Path,
) -> Carried:
    """Choose the best setting; carry it only where its lead over the reference is significant over seeds.

    `choosing`, `comparing`: setting -> seed -> correctness (problems of that half).
    """
    means = {key: mean_of(of_seeds) for key, of_seeds in choosing.items()}
    best = max(means, key=lambda key: (means[key], key == reference))
    others = [key for key in choosing if key != reference]
    named_means = {setting_text(dict(key)): mean for key, mean in means.items()}
    if best == reference:
        text = f"{folder.name}: keeps the default {setting_text(dict(reference))}: no other setting had a larger mean"
        return Carried(
            str(folder), [], True, dict(best), dict(reference), named_means, None, None, None, text
        )  # fmt: skip
    differences = {key: compared(choosing[key], choosing[reference]) for key in others}
    adjusted = dict(zip(others, holm([differences[key].p for key in others]), strict=True))
    difference, p = differences[best], adjusted[best]
    takes = difference.mean > 0 and p <= LEVEL and difference.over != PROBLEMS
    apart = compared(comparing[best], comparing[reference])
    verdict = sentence(difference, p, len(others))
    name, default = setting_text(dict(best)), setting_text(dict(reference))
    if takes:
        text = f"{folder.name}: carries {name}: {verdict} than {default}; on the problems that did not choose it: "
        text += sentence(apart)
    else:
        text = f"{folder.name}: keeps the default {default}: of {name}, which has the largest mean: {verdict}"
        if difference.over == PROBLEMS:
            text += f"; {settling(difference, LEVEL / len(others))}, as seeds are assumed to spread"
    words = [f"{key}={value}" for key, value in best] if takes else []
    return Carried(
        str(folder), words, not takes, dict(best), dict(reference), named_means, difference, p, apart, text
    )  # fmt: skip


def setting_text(setting: Setting) -> str:
    """Return a setting as it is typed.

    >>> setting_text({"loss": "grpo_clip", "epochs": "2"}), setting_text({})
    ('loss=grpo_clip epochs=2', 'the default')
    """
    return " ".join(f"{key}={value}" for key, value in setting.items()) or "the default"


def refuse_shared_time(runs: Sequence[RunState]) -> None:
    """Raise `ConfigError` if runs that shared the machine were ended by the clock: their budgets were not equal."""
    odd = [run.name for run in runs if run.shared_machine and run.status == "budget" and "budget.hours" in run.reason]
    if odd:
        raise ConfigError(
            f"{few(odd, 3)} shared the machine and were ended by budget.hours, so what they reached says nothing of "
            "their settings: run them one at a time (jobs=1) in another folder, or give a budget of tokens or steps"
        )


def _reference(state: SweepState, folder: Path) -> Key:
    """Return the one setting that matches the reference; settings may have more keys than it names."""
    if state.reference is None:
        raise ConfigError(
            f"carry={folder} holds no setting that the others are compared with: name it in its file's block "
            "`reference: [key=value]`, have it among the values, and type the sweep again (what has run stays)"
        )
    settings = list(dict.fromkeys(run.key for run in state.runs))
    fitting = [key for key in settings if dict(key) == state.reference]
    fitting = fitting or [key for key in settings if state.reference.items() <= dict(key).items()]
    if len(fitting) != 1:
        many = "several of its settings have" if fitting else "none of its settings is"
        raise ConfigError(
            f"carry={folder}: {many} its reference {setting_text(state.reference)}: run a sweep that holds it once"
        )
    return fitting[0]


def _caveats(state: SweepState, folder: Path, varied: Sequence[str], measured: Collection[str]) -> list[str]:
    """Return what limits a verdict: early ends, missing seeds, a varied protocol; and the model and data used."""
    caveats = []
    for run in state.runs:
        if run.name not in measured:
            caveats.append(f"{run.name} has no final evaluation ({run.status})")
        elif run.status != "finished":
            caveats.append(f"{run.name} counts as {run.status} left it")
    seeds = {run.seed for run in state.runs}
    for setting in dict.fromkeys(run.key for run in state.runs):
        if missing := sorted(seeds - {run.seed for run in state.runs if run.key == setting}):
            caveats.append(f"{setting_text(dict(setting))} has not run seed {few([str(seed) for seed in missing])}")
    if varied:
        caveats.append(f"the sweep varies the protocol's {', '.join(varied)} on purpose")
    first = RunFolder(folder / next(iter(measured)))
    names = [f"{key}={name}" for key in ("model", "data") if (name := first.setting(f"{key}.name"))]
    return [*caveats, *([f"chosen with {' '.join(names)}"] if names else [])]


Right = Mapping[Key, Mapping[int, Floats]]  # setting -> seed -> correctness (problems)


class SureLoss(NamedTuple):
    """A setting that surely loses: to which, by how much, and at which level."""

    setting: Key
    better: Key
    difference: Difference  # the setting minus the better one
    adjusted_p: float
    level: float


def losers(right: Right, reference: Key | None, settings: int, planned_seeds: int) -> list[SureLoss]:
    """Return the settings that surely lose, each with its clearest comparison.

    `right`: of the runs that have ended. `settings`, `planned_seeds`: how many the sweep has in all. The level is
    divided by the number of looks, and Holm's method corrects over the pairs.
    """
    looks = planned_seeds - FEWEST_SEEDS
    if looks < 1:
        return []
    level = LEVEL / looks
    pairs = [(key, reference) for key in right if key != reference] if reference else itertools.combinations(right, 2)
    family = settings - 1 if reference else settings * (settings - 1) // 2
    enough = [(a, b) for a, b in pairs if b in right and len(right[a].keys() & right[b].keys()) >= FEWEST_SEEDS]
    looked = [(a, b, compared(_shared(right, a, b), _shared(right, b, a))) for a, b in enough]
    losses: dict[Key, SureLoss] = {}
    for (a, b, d), p in zip(looked, holm([d.p for _, _, d in looked], family), strict=True):
        turned = replace(d, mean=-d.mean, low=-d.high, high=-d.low)
        worse, better, minus = (a, b, d) if d.mean < 0 else (b, a, turned)
        if p > level or worse == reference:
            continue
        if worse not in losses or p < losses[worse].adjusted_p:
            losses[worse] = SureLoss(worse, better, minus, p, level)
    return list(losses.values())


def _shared(right: Right, one: Key, other: Key) -> dict[int, Floats]:
    """Return the runs of one setting whose seeds the other has run too."""
    return {seed: values for seed, values in right[one].items() if seed in right[other]}


def why_dominated(folder: Path, say: Callable[[str], None] = print_stderr) -> str:
    """Return why the setting of the sweep's run in `folder` can no longer win, by the runs next to it; "" if it may.

    If the settings cannot be compared, the reason is printed and nothing is stopped.
    """
    state = read_state(folder.parent)
    setting = state.run(folder.name).setting
    for stopped in state.stopped_settings:
        if stopped["setting"] == setting:
            return str(stopped["reason"])
    try:
        ended = [(run, one) for run in state.runs if run.of_its_own and (one := outcomes_of(folder.parent, run))]
        return _why_it_loses(setting, state, ended) if ended else ""
    except ConfigError as error:
        say(f"! monitors.dominated=stop stops nothing: {error}")
        return ""


def _why_it_loses(setting: Setting, state: SweepState, ended: Sequence[tuple[RunState, Outcomes]]) -> str:
    """Return why a setting surely loses, "" if it does not; `ConfigError` if the runs are not comparable."""
    refuse_shared_time([run for run, _ in ended])
    outcomes = [one for _, one in ended]
    refuse_unequal(outcomes, state.axes)
    problems = common_problems(outcomes, CHOOSING)
    grouped: dict[Key, list[Outcomes]] = {}
    for run, one in ended:
        grouped.setdefault(run.key, []).append(one)
    right = {key: correctness(of, problems) for key, of in grouped.items()}
    settings = {run.key for run in state.runs}
    reference = next((key for key in settings if dict(key) == state.reference), None)
    if state.reference is not None and reference is None:
        raise ConfigError(
            f"the sweep's reference {setting_text(state.reference)} is none of its settings: run it as well"
        )
    losses = losers(right, reference, len(settings), len({run.seed for run in state.runs}))
    loss = next((loss for loss in losses if dict(loss.setting) == setting), None)
    if loss is None:
        return ""
    d, better = loss.difference, setting_text(dict(loss.better))
    return (
        f"worse than {better} by {points(-d.mean)} ({points(-d.high)} to {points(-d.low)}) over {d.seeds} seeds and "
        f"{d.problems} problems; Holm's p {loss.adjusted_p:.2g}, below {loss.level:.2g}"
    )
