"""Build the whole report of a study, warn of what its reader must know, and show the same problems over training."""

import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of
from rlreason.records.files import EVALS, ResponseFile, each_line, response_files
from rlreason.report import tables
from rlreason.report.content import Case, Report
from rlreason.report.documents import filled
from rlreason.report.figures import figures_of, forest_of, legend_of
from rlreason.report.study import RUNNING, Setting, Study, StudyRun
from rlreason.report.verdicts import EQUAL_WITHIN, summary_of, verdicts_of
from rlreason.runtime.text import duration, few
from rlreason.sweeps.state import WAITING


def build_report(study: Study, equal_within: float = EQUAL_WITHIN) -> Report:
    """Build the whole report of a study."""
    verdicts = verdicts_of(study, equal_within)
    maybe = [tables.passes_table(study), tables.health_table(study)]
    return Report(
        name=study.name,
        question=study.question,
        summary=summary_of(verdicts, study),
        lead=lead_of(study),
        legend=legend_of(study, verdicts),
        verdicts=verdicts,
        facts=facts_of(study),
        warnings=[
            *warnings_of(study),
            *study.notes,
            *(f"Carried from an earlier sweep: {one}" for one in study.carried),
        ],
        figures=figures_of(study),
        tables=[tables.settings_table(study, verdicts), *(table for table in maybe if table is not None)],
        log=tables.log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=[*tables.details_of(study), ("Method", filled("method.txt.j2"))],
        forest=forest_of(verdicts),
    )


def lead_of(study: Study) -> str:
    """Return what was compared with what, in two sentences."""
    seeds, finals = [len(one.runs) for one in study.settings], [run for run in study.runs if run.final is not None]
    return filled(
        "lead.txt.j2",
        study=study,
        differs=what_differs(study),
        fewest=min(seeds),
        most=max(seeds),
        answered=max((len(run.final.problems) for run in finals if run.final is not None), default=0),
        early=any(not run.ended for run in finals),
        chosen=few([one.label for one in study.settings if one.best_of]),
    )


UNEQUAL = 1.25  # a ratio of two budgets above it makes them different


def facts_of(study: Study) -> list[tuple[str, str]]:
    """Return the facts below the first screen: term and description."""
    protocols = [run.protocol for run in study.runs if run.protocol is not None]
    tokens = sorted(total for one in study.settings if (total := mean_total(one, "tokens")))
    timed = [run.seconds for run in study.runs if run.seconds is not None]
    early = [run for run in study.runs if run.status not in (WAITING, RUNNING) and (not run.ended or run.diverged)]
    facts = filled(
        "facts.txt.j2",
        differs=what_differs(study),
        steps=sorted({run.planned_steps for run in study.runs if run.planned_steps}),
        tokens=[tables.millions(of) for of in tokens],
        unequal=bool(tokens) and tokens[-1] > UNEQUAL * tokens[0],
        early=len(early),
        running=sum(run.status == RUNNING for run in study.runs),
        hashes=list(dict.fromkeys(str(protocol.get("hash")) for protocol in protocols)),
        measured=len(protocols),
        overlaps=sorted({str(how) for run in study.runs if (how := run.settings.get("data.overlap"))}),
        health=health_of(study),
        timed=len(timed),
        seconds=duration(sum(timed)),
        sampled=tables.millions(sum(run.totals.get("tokens", 0.0) for run in study.runs)),
        shared=any(run.shared_machine for run in study.runs),
    )
    return [(term, text) for term, _, text in (line.partition(": ") for line in facts.splitlines()) if text]


def what_differs(study: Study) -> str:
    """Return the swept keys that vary, in words."""
    return few(study.varied or study.axes, 3) or "see below" if len(study.settings) > 1 else "the seed alone"


def health_of(study: Study) -> str:
    """Return in words how many of the runs have something wrong."""
    examined = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in examined)
    return (
        f"something is wrong in {ill} of {len(examined)} runs" if ill else f"nothing is wrong in {len(examined)} runs"
    )


def mean_total(one: Setting, axis: str) -> float:
    """Return the mean of a counter of AXES at the end of the setting's runs; 0 without any."""
    totals = [run.totals[axis] for run in one.runs if run.ended and not run.diverged and axis in run.totals]
    return float(np.mean(totals)) if totals else 0.0


# ---- warnings ----

FEW_PROBLEMS = 16  # on fewer, seeds may agree by chance
CONTROL = "python -m rlreason -m sweep=controls seed=0,1,2,3"


def warnings_of(study: Study) -> Iterator[str]:
    """Yield what makes the runs less comparable than they look, a plain sentence each."""
    for one in study.settings:
        answers = [shares for shares in one.right.values() if shares and len(shares) >= FEW_PROBLEMS]
        mixed = [shares for shares in answers if len({*shares.values()}) > 1]
        if len(mixed) > 1 and all(shares == mixed[0] for shares in mixed[1:]):
            yield (
                f"All {len(mixed)} seeds of {one.label} gave the same answers to every problem: if they are copies of "
                "one run, they tell no more than one seed."
            )
        for rule in ("few_live_groups", "many_cut"):  # notes, which the table of health leaves out
            if noted := [finding.what for run in one.runs for finding in run.findings if finding.rule == rule]:
                yield f"In {one.label} ({len(noted)} of {len(one.runs)} seeds) {noted[0]}."
    for axis, what in (("tokens", "generated tokens"), ("updates", "optimizer updates")):
        base, totals = mean_total(study.reference, axis), {one.label: mean_total(one, axis) for one in study.settings}
        ratios = {label: total / base for label, total in totals.items() if base and total}
        odd = [f"{label}: {q:.1f} times" for label, q in ratios.items() if q > UNEQUAL or q < 1 / UNEQUAL]
        if odd:
            cure = f"read the curves against {axis} too"
            yield f"The {what} differ from those of {study.reference.name} ({few(odd, 3)}): {cure}."
    settings = [run.settings for run in study.runs]
    if any(one.get("data.overlap") == "allow" for one in settings):
        yield "Training and validation problems may overlap (data.overlap=allow): accuracy may be memory."
    models = [f"{one.get('model.name')} {one.get('model.path')} on {one.get('data.name')}".lower() for one in settings]
    is_qwen_on_math = any(re.search("qwen.* on .*math", model) for model in models)
    if is_qwen_on_math and not any(str(one.get("prompt.reward")).startswith("rlreason.grading:") for one in settings):
        yield f"No control reward was run. On Qwen models random rewards have raised MATH too: run {CONTROL}."
    failures = [run.series["eval/grading_failures"] for run in study.runs if "eval/grading_failures" in run.series]
    if failed := sum(float(series.y.sum()) for series in failures):
        yield f"{failed:.0f} responses of evaluations got no grade (timeouts or errors) and count as wrong."
    names = {"code": "code", "hardware": "graphics card or processor", "packages": "library versions"}
    for key, name in names.items():
        values = {str(run.provenance[key]) for run in study.runs if run.provenance.get(key)}
        if len(values) > 1:
            yield f"Not all runs had the same {name}: {len(values)} different ones are on record."


# ---- the same problems over training ----

PROBLEMS_SHOWN, SETTINGS_SHOWN = 4, 6  # at most
SHOWN = ("problem_id", "response", "outcome")  # fields of a response
OUTCOMES = {"correct": "correct", "format1_wrong": "wrong", "format0": "no format"}
LONGEST = 600  # characters of a response


def cases_of(study: Study) -> list[Case]:
    """Select problems by a fixed rule, with responses of the smallest seed that all settings share.

    The first problem, in the order of a hash, that each possible number of settings solves in the end. The steps are
    those of the reference. [] if the runs have saved no evaluations.
    """
    by_seed = {one.label: {run.seed: run for run in one.runs if run.final is not None} for one in study.settings}
    by_seed = dict([(label, of_seeds) for label, of_seeds in by_seed.items() if of_seeds][:SETTINGS_SHOWN])
    seeds = set.intersection(*map(set, by_seed.values())) if by_seed else set()
    runs = {label: of_seeds[min(seeds or of_seeds)] for label, of_seeds in by_seed.items()}
    files = {  # of two evaluations of one step the later one, which is the final one
        label: {file.step: file for file in response_files(run.folder, EVALS) if file.step is not None}
        for label, run in runs.items()
    }
    saved, texts = sorted(next(iter(files.values()), {})), dict[str, tuple[str, str]]()
    steps = sorted({saved[0], saved[len(saved) // 2], saved[-1]}) if saved else []
    cases = {problem: {step: list[dict[str, str]]() for step in steps} for problem in _choose(list(runs.values()))}
    for step, label in product(steps, runs):
        for name, (line, row) in _responses(files[label].get(step), cases).items():
            texts[name] = shown_text(str(row.get("question"))), shown_text(str(row.get("gold")))
            outcome = OUTCOMES[category_of(row | {"format_reward": row.get("format_reward") or 0})]
            where = f"{Path(*files[label][step].path.parts[-3:])}:{line}"
            shown = {"setting": label, "outcome": outcome, "text": shown_text(row["response"]), "where": where}
            cases[name][step].append(shown)
    return [Case(*texts[name], by_step) for name, by_step in cases.items() if by_step and all(by_step.values())]


def _choose(runs: Sequence[StudyRun]) -> list[str]:
    """Choose the problems to show, among those that all these runs answered at first and in the end."""
    finals = [run.final.problems for run in runs if run.final is not None]
    answered = [set(problems) for problems in finals]
    answered += [set(run.start.problems) for run in runs if run.start is not None]
    common = set.intersection(*answered) if answered else set()
    ordered = sorted(common, key=lambda name: (zlib.crc32(name.encode()), name))
    first: dict[int, str] = {}  # number of runs that solve it in the end -> problem
    for name in ordered:
        first.setdefault(sum(final[name].share == 1 for final in finals), name)
    return list(dict.fromkeys([*first.values(), *ordered]))[:PROBLEMS_SHOWN]


def _responses(file: ResponseFile | None, problems: Collection[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return the line and the row of the first response to each of these problems."""
    responses: dict[str, tuple[int, dict[str, Any]]] = {}
    try:
        for line, row in each_line(file.path, lambda _: None, SHOWN) if file else ():
            if row["problem_id"] in problems:
                responses.setdefault(row["problem_id"], (line, row))
    except ConfigError:  # reading the study has reported it
        pass
    return responses


def shown_text(text: str) -> str:
    """Return at most LONGEST characters of a text.

    >>> shown_text("x" * 601)[-23:]
    'x ... 1 more characters'
    """
    return text[:LONGEST] + (f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else "")
