"""Decide what a finished sweep hands on to the next, and which settings of a running sweep can no longer win."""

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder, runs_in
from rlreason.report.read import read_study
from rlreason.report.study import CHOOSING, COMPARING, Study, choosing_mean, half, unequal
from rlreason.report.verdicts import EQUAL_WITHIN, Pairing, best_of, interval, p_text, pair, size, verdicts_of
from rlreason.runtime.looks import UNLIKELY, chance
from rlreason.runtime.statistics import LEVEL, SEEDS, Difference, holm
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few
from rlreason.sweeps.state import FEWEST_SEEDS, FILE, SWEEPS, Key, read_state, setting_text, sweeps_named

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
    setting: dict[str, str]  # the best
    reference: dict[str, str]
    means: dict[str, float]  # setting -> mean accuracy over its seeds, on the problems that choose
    difference: Difference | None
    adjusted_p: float | None  # of `difference`, by Holm
    apart: Difference | None
    sentence: str
    model: str = ""  # that it was chosen with


def sweep_folder(word: str, model: str = "", data: str = "") -> Path:
    """Return the folder that `carry=` names: a path, or below runs/sweeps a folder of this name or with this `sweep=`.

    Of several, prefer the same model and data, then a finished sweep, then the newest.
    """
    if word and Path(word).is_dir():
        return Path(word)

    def nearness(folder: Path) -> tuple[bool, bool, float]:
        begun = [RunFolder(run).setting for run in runs_in(folder)]
        same = bool(begun) and (model_of(begun[0]), begun[0]("data.name")) == (model, data)
        whole = all(run.of_its_own for run in read_state(folder, lambda _: None).runs)
        return same, whole, (folder / FILE).stat().st_mtime

    folders = sweeps_named(SWEEPS, word)
    if word and (SWEEPS / word / FILE).is_file():
        folders.append(SWEEPS / word)
    if folders:
        return max(folders, key=nearness)
    names = few(sorted(path.name for path in SWEEPS.glob("*") if path.is_dir())) or "none"
    raise ConfigError(f"carry={word} is no sweep that has run: give one of {SWEEPS} ({names}), or a sweep's folder")


def carry(folder: Path) -> Carried:
    """Return what the finished sweep in a folder hands on: its best setting, if its lead is significant over seeds."""
    study = finished(folder)
    reference, best = study.reference, best_of(study)
    takes, chosen, apart = False, None, None
    text = f"keeps the default {reference.typed}: no other setting had a larger mean"
    if best is not reference:
        choosing, comparing = (half(study.settings, which) for which in (CHOOSING, COMPARING))
        chosen = verdicts_of(replace(study, among=choosing), sets=False)[study.settings.index(best) - 1]
        [apart] = verdicts_of(replace(study, settings=[reference, best], among=comparing), sets=False)
        takes = chosen.outcome == "better" and len(best.finals) > 1
        text = f"keeps the default {reference.typed}: of {best.typed}, which has the largest mean: {chosen.sentence}"
        if takes:
            text = f"carries {best.typed}: {chosen.sentence} On the problems that did not choose it: {apart.sentence}"
    first = RunFolder(study.runs[0].folder).setting
    return Carried(
        sweep=str(folder),
        words=[f"{key}={value}" for key, value in best.key] if takes else [],
        kept_default=not takes,
        setting=dict(best.key),
        reference=dict(reference.key),
        means={one.typed: choosing_mean(one) for one in study.settings},
        difference=chosen.difference if chosen else None,
        adjusted_p=chosen.adjusted_p if chosen else None,
        apart=apart.difference if apart else None,
        sentence=f"{folder.name}: {text} Chosen with model={first('model.name')} data={first('data.name')}.",
        model=model_of(first),
    )


def best_arms(folder: Path) -> list[dict[str, str]]:
    """Return a finished sweep's reference and its best other settings (at most BEST) whose runs did not all diverge."""
    study = finished(folder)
    others = [one for one in study.settings[1:] if one.finals]
    others.sort(key=choosing_mean, reverse=True)
    return [dict(one.key) for one in (study.reference, *others[:BEST])]


def finished(folder: Path) -> Study:
    """Return the study of a finished sweep; `ConfigError` if it has not finished, or cannot choose a setting."""
    state = read_state(folder)
    if bad := [f"{run.name}: {run.status_text}" for run in state.runs if not run.of_its_own]:
        many = f"{len(bad)} of its {len(state.runs)} runs did not come to their end ({few(bad, 3)})"
        raise ConfigError(f"carry={folder} has not finished: {many}: type that sweep again, which goes on with them")
    study = read_study([folder])
    if state.reference is None:
        raise ConfigError(
            f"carry={folder}: the setting that the others are compared with is none: name one of them in the block "
            "`reference: [key=value]` of the sweep's file, and type the sweep again (what has run stays)"
        )
    refuse_incomparable(study, state.reference)
    return study


def refuse_incomparable(study: Study, reference: Mapping[str, str] | None) -> None:
    """Raise `ConfigError` unless all runs that have ended were measured alike, on the same problems.

    `reference`: of the sweep, which must be one of its settings; None where it names none.
    """
    if reference is not None and not reference.items() <= dict(study.reference.key).items():
        raise ConfigError(
            f"the setting that the others are compared with is {setting_text(dict(reference))}, which has not run: run "
            "it as well, or name another one in the block `reference: [key=value]` of the sweep's file"
        )
    shared = [run for run in study.runs if run.shared_machine and run.status == "budget"]
    if late := [run.folder.name for run in shared if "budget.hours" in run.reason]:
        why = "shared the machine and were ended by budget.hours, so what they reached says nothing of their settings"
        raise ConfigError(f"{few(late, 3)} {why}: run them with jobs=1 in another folder, or by a budget of tokens")
    for run in study.runs:
        if run.ended and run.accuracy is None:
            raise ConfigError(f"{run.folder} has lost its final evaluation: move it away and run it again")
    for one in study.settings:
        if others := unequal(one, study.reference, study.on_purpose)[0]:
            raise ConfigError(
                f"{study.reference.typed} and {one.typed} were measured differently ({'; '.join(others)}) and cannot "
                "be compared: evaluate all settings of a sweep in one way"
            )
    asked = [(run.folder.name, run.final) for run in study.runs if run.final]
    for name, problems in asked[1:]:
        if odd := sorted(problems.keys() ^ asked[0][1].keys()):
            names = f"{asked[0][0]} and {name}"
            raise ConfigError(f"{names} did not ask the same problems ({few(odd, 3)}): evaluate all on the same")
    for which in (CHOOSING, COMPARING):
        if asked and not half(study.settings, which):
            raise ConfigError(f"{asked[0][0]} has no problem in the half for {which}: raise eval.final_problems")


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


# Settings that can no longer win, and those that get no more seeds


def look(folder: Path, seeds: int, asked: Set[Key]) -> tuple[dict[Key, str], set[Key]]:
    """Look at the first `seeds` seeds of a sweep: return those `asked` settings that get no more, with why, and those
    that do, the reference too.

    A setting of which fewer than two runs have an accuracy is in neither. The runs' own validation decides; `eval.sets`
    belong to the family that is corrected.
    """
    study = read_study([folder])
    settings = [
        replace(one, runs=[run for run in one.runs if run.seed < seeds and run.ended]) for one in study.settings
    ]
    every = verdicts_of(replace(study, settings=settings))
    verdicts = zip(settings[1:], (one for one in every if not one.of_set), strict=True)
    measured = {one.key for one in settings if len(one.accuracies) > 1}
    judged = {
        one.key: verdict for one, verdict in verdicts if one.key in measured & asked and settings[0].key in measured
    }
    labels = {verdict.setting for verdict in judged.values()}
    undecided = sum(one.outcome == "cannot tell" for one in every if one.setting in labels)
    ended, going = dict[Key, str](), set[Key]()
    for key, verdict in judged.items():
        if verdict.outcome != "cannot tell" or verdict.difference is None or seeds == study.max_seeds:
            ended[key] = verdict.outcome or verdict.word
        elif (
            verdict.difference.seeds == seeds  # else a run has failed, and may be run again
            and chance(verdict.difference, study.max_seeds, undecided, EQUAL_WITHIN) < UNLIKELY
        ):
            ended[key] = f"unlikely to be decided with {study.max_seeds}"
        else:
            going |= {key, settings[0].key}
    return ended, going


def losers(
    leads: Mapping[tuple[Key, Key], Difference], reference: Key | None, settings: int, planned_seeds: int
) -> dict[Key, str]:
    """Return the settings that surely lose, each with the reason by its clearest comparison.

    `leads`: two settings -> the first minus the second. `settings`, `planned_seeds`: how many the sweep has in all. The
    level is divided by the number of looks, and Holm's method corrects over the pairs.
    """
    looks = planned_seeds - FEWEST_SEEDS
    if looks < 1:
        return {}
    level = LEVEL / looks
    family = settings - 1 if reference else settings * (settings - 1) // 2
    found = [(*of, d) for of, d in leads.items() if d.over == SEEDS and d.seeds >= FEWEST_SEEDS]
    reasons: dict[Key, str] = {}
    adjusted = holm([lead.p for _, _, lead in found], family)
    for (a, b, lead), p in sorted(zip(found, adjusted, strict=True), key=lambda one: one[1]):
        better, worse = (a, b) if lead.mean >= 0 else (b, a)
        if p <= level and worse != reference:
            by = f"{size(lead.mean)} accuracy points ({interval(lead)})"
            over = f"over {lead.seeds} seeds and {lead.problems} problems; Holm's {p_text(p)}, below {level:.2g}"
            reasons.setdefault(worse, f"worse than {setting_text(dict(better))} by {by} {over}")
    return reasons


def why_dominated(folder: Path) -> str:
    """Return why the setting of the sweep's run in `folder` can no longer win, by the runs next to it; "" if it may."""
    state = read_state(folder.parent)
    mine = state.run(folder.name)
    for stopped in state.stopped_settings:
        if stopped["setting"] == mine.setting:
            return str(stopped["reason"])
    study = read_study([folder.parent])
    settings = [replace(one, runs=[run for run in one.runs if run.ended]) for one in study.settings]
    ended = replace(study, settings=settings)
    reference = None if state.reference is None else study.reference.key
    try:
        refuse_incomparable(ended, state.reference)
    except ConfigError as error:
        print_stderr(f"! monitors.dominated=stop stops nothing: {error}")
        return ""
    choosing, leads = replace(ended, among=half(settings, CHOOSING)), dict[tuple[Key, Key], Difference]()
    for one, other in itertools.combinations(settings, 2):
        if reference in (None, one.key, other.key):
            found = pair(one, replace(choosing, settings=[other, one]))
            if isinstance(found, Pairing):
                leads[one.key, other.key] = found.difference
    return losers(leads, reference, len(study.settings), len({run.seed for run in state.runs})).get(mine.key, "")
