"""Decide what a finished sweep hands on to the next, and which settings of a running sweep can no longer win."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.records.reader import RunFolder
from rlreason.runtime.statistics import LEVEL, PROBLEMS, Difference, compared, holm, points, sentence, settling
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few
from rlreason.sweeps.outcomes import CHOOSING, COMPARING, Outcomes, Right, comparable, correctness, mean_of
from rlreason.sweeps.state import (
    FEWEST_SEEDS,
    FILE,
    SWEEPS,
    Key,
    Setting,
    SweepState,
    read_state,
    setting_text,
    sweeps_named,
)

BEST = 3  # settings of a broad sweep that a focused one runs again, besides the reference


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


def sweep_folder(word: str, model: str = "", data: str = "") -> Path:
    """Return the folder that `carry=` names: a path, or below runs/sweeps a folder of this name or with this `sweep=`.

    Of several, prefer the same model and data, then a finished sweep, then the exact name, then the newest.
    """
    if word and Path(word).is_dir():
        return Path(word)
    exact = SWEEPS / word

    def nearness(folder: Path) -> tuple[bool, bool, bool, float]:
        runs = read_state(folder, lambda _: None).runs
        begun = [RunFolder(folder / run.name).setting for run in runs if (folder / run.name / CONFIG).exists()]
        same = bool(begun) and (model_of(begun[0]), begun[0]("data.name")) == (model, data)
        return same, all(run.of_its_own for run in runs), folder == exact, (folder / FILE).stat().st_mtime

    if folders := {*sweeps_named(SWEEPS, word), *([exact] if word and exact.is_dir() else [])}:
        return max(folders, key=nearness) if len(folders) > 1 else folders.pop()
    names = few(sorted(path.name for path in SWEEPS.glob("*") if path.is_dir())) or "none"
    raise ConfigError(f"carry={word} is no sweep that has run: give one of {SWEEPS} ({names}), or a sweep's folder")


def carry(folder: Path) -> Carried:
    """Return what the finished sweep in a folder hands on: its best setting, if its lead is significant over seeds."""
    state = read_state(folder)
    reference, outcomes, varied = _finished(state, folder)
    choosing, comparing = correctness(outcomes, CHOOSING), correctness(outcomes, COMPARING)
    means = {key: mean_of(of_seeds) for key, of_seeds in choosing.items()}
    best = max(means, key=lambda key: (means[key], key == reference))
    name, default = setting_text(dict(best)), setting_text(dict(reference))
    takes, difference, adjusted_p, apart = False, None, None, None
    text = f"keeps the default {default}: no other setting had a larger mean"
    if best != reference:
        differences = {key: compared(choosing[key], choosing[reference]) for key in choosing if key != reference}
        adjusted = dict(zip(differences, holm([one.p for one in differences.values()]), strict=True))
        difference, adjusted_p = differences[best], adjusted[best]
        apart = compared(comparing[best], comparing[reference])
        takes = difference.mean > 0 and adjusted_p <= LEVEL and difference.over != PROBLEMS
        verdict = sentence(difference, adjusted_p, len(differences))
        text = f"keeps the default {default}: of {name}, which has the largest mean: {verdict}"
        if takes:
            on_others = f"on the problems that did not choose it: {sentence(apart)}"
            text = f"carries {name}: {verdict} than {default}; {on_others}"
        elif difference.over == PROBLEMS:
            text += f"; {settling(difference, LEVEL / len(differences))}, as seeds are assumed to spread"
    first = RunFolder(folder / outcomes[0].run.name).setting
    chosen_with = f"chosen with model={first('model.name')} data={first('data.name')}"
    return Carried(
        sweep=str(folder),
        words=[f"{key}={value}" for key, value in best] if takes else [],
        kept_default=not takes,
        setting=dict(best),
        reference=dict(reference),
        means={setting_text(dict(key)): mean for key, mean in means.items()},
        difference=difference,
        adjusted_p=adjusted_p,
        apart=apart,
        sentence="; ".join([f"{folder.name}: {text}", *_caveats(state, outcomes, varied), chosen_with]),
        model=model_of(first),
    )


def best_arms(folder: Path) -> list[Setting]:
    """Return a finished sweep's reference and its best other settings (at most BEST) whose runs did not all diverge."""
    reference, outcomes, _ = _finished(read_state(folder), folder)
    right = correctness(outcomes, CHOOSING)
    others = [key for key in dict.fromkeys(one.run.key for one in outcomes if one.right) if key != reference]
    others.sort(key=lambda key: mean_of(right[key]), reverse=True)
    return [dict(key) for key in (reference, *others[:BEST])]


def _finished(state: SweepState, folder: Path) -> tuple[Key, list[Outcomes], list[str]]:
    """Return a finished sweep's reference, and what `comparable` returns."""
    if bad := [f"{run.name}: {run.status_text}" for run in state.runs if not run.of_its_own]:
        many = f"{len(bad)} of its {len(state.runs)} runs did not come to their end ({few(bad, 3)})"
        raise ConfigError(f"carry={folder} has not finished: {many}: type that sweep again, which goes on with them")
    if state.reference is None:
        raise ConfigError(
            f"carry={folder} holds no setting that the others are compared with: name it in its file's block "
            "`reference: [key=value]`, and type the sweep again (what has run stays)"
        )
    outcomes, varied = comparable(state, folder)
    keys = dict.fromkeys(one.run.key for one in outcomes)
    fitting = [key for key in keys if dict(key) == state.reference]
    fitting = fitting or [key for key in keys if state.reference.items() <= dict(key).items()]
    if len(fitting) != 1:
        raise ConfigError(
            f"carry={folder}: {len(fitting)} of its settings are its reference {setting_text(state.reference)}: give "
            "a sweep that holds it once"
        )
    return fitting[0], outcomes, varied


def _caveats(state: SweepState, outcomes: Sequence[Outcomes], varied: Sequence[str]) -> list[str]:
    """Return what limits a verdict: early ends, missing seeds, a varied protocol."""
    measured = [one.run.name for one in outcomes]
    caveats = [f"{run.name} has no final evaluation ({run.status})" for run in state.runs if run.name not in measured]
    caveats += [f"{o.run.name} counts as {o.run.status} left it" for o in outcomes if o.run.status != "finished"]
    seeds = {run.seed for run in state.runs}
    for setting in dict.fromkeys(run.key for run in state.runs):
        if missing := sorted(seeds - {run.seed for run in state.runs if run.key == setting}):
            caveats.append(f"{setting_text(dict(setting))} has not run seed {few([str(seed) for seed in missing])}")
    return [*caveats, f"the sweep varies the protocol's {', '.join(varied)} on purpose"] if varied else caveats


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


# Settings that can no longer win


def losers(right: Right, reference: Key | None, settings: int, planned_seeds: int) -> dict[Key, str]:
    """Return the settings that surely lose, each with the reason by its clearest comparison.

    `settings`, `planned_seeds`: how many the sweep has in all. The level is divided by the number of looks, and Holm's
    method corrects over the pairs.
    """
    looks = planned_seeds - FEWEST_SEEDS
    if looks < 1:
        return {}
    level = LEVEL / looks
    pairs: Iterable[tuple[Key, Key]] = itertools.combinations(right, 2)
    family = settings * (settings - 1) // 2
    if reference:
        pairs, family = [(key, reference) for key in right if key != reference and reference in right], settings - 1
    found = []
    for a, b in pairs:
        seeds = right[a].keys() & right[b].keys()
        if len(seeds) >= FEWEST_SEEDS:
            ones, others = ({seed: right[key][seed] for seed in right[key] if seed in seeds} for key in (a, b))
            found.append((a, b, compared(ones, others)))
    reasons: dict[Key, str] = {}
    adjusted = holm([lead.p for _, _, lead in found], family)
    for (better, worse, lead), p in sorted(zip(found, adjusted, strict=True), key=lambda one: one[1]):
        if lead.mean < 0:
            better, worse = worse, better
            lead = replace(lead, mean=-lead.mean, low=-lead.high, high=-lead.low)
        if p <= level and worse != reference:
            by = f"{points(lead.mean)} ({points(lead.low)} to {points(lead.high)})"
            over = f"over {lead.seeds} seeds and {lead.problems} problems; Holm's p {p:.2g}, below {level:.2g}"
            reasons.setdefault(worse, f"worse than {setting_text(dict(better))} by {by} {over}")
    return reasons


def why_dominated(folder: Path, say: Callable[[str], None] = print_stderr) -> str:
    """Return why the setting of the sweep's run in `folder` can no longer win, by the runs next to it; "" if it may."""
    state = read_state(folder.parent)
    mine, settings = state.run(folder.name), {run.key for run in state.runs}
    for stopped in state.stopped_settings:
        if stopped["setting"] == mine.setting:
            return str(stopped["reason"])
    reference = next((key for key in settings if dict(key) == state.reference), None)
    try:
        outcomes, _ = comparable(state, folder.parent)
        if not outcomes:
            return ""
        if state.reference is not None and reference is None:
            raise ConfigError(
                f"the sweep's reference {setting_text(state.reference)} is none of its settings: run it as well"
            )
        seeds = len({run.seed for run in state.runs})
        return losers(correctness(outcomes, CHOOSING), reference, len(settings), seeds).get(mine.key, "")
    except ConfigError as error:
        say(f"! monitors.dominated=stop stops nothing: {error}")
        return ""
