"""Build the whole report of a study, and show the same problems over training."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of
from rlreason.records.files import EVALS, ResponseFile, each_line, response_files
from rlreason.records.rows import lacks
from rlreason.report import tables
from rlreason.report.content import Case, Detail, Report, ShownResponse
from rlreason.report.documents import filled
from rlreason.report.figures import figures_of, forest_of, legend_of
from rlreason.report.read import without_ids
from rlreason.report.remarks import UNEQUAL, mean_total, warnings_of
from rlreason.report.study import RUNNING, Study, StudyRun
from rlreason.report.tables import health_table
from rlreason.report.verdicts import EQUAL_WITHIN, summary_of, verdicts_of
from rlreason.runtime.text import duration, few
from rlreason.sweeps.state import WAITING

ONE_SAMPLE = "Every problem was asked once, so there is no pass@k: eval.samples=8 asks each eight times."


def build_report(study: Study, equal_within: float = EQUAL_WITHIN) -> Report:
    """Build the whole report of a study."""
    verdicts = verdicts_of(study, equal_within)
    carried = [f"Carried from an earlier sweep: {one['sentence']}" for one in study.carried if one.get("sentence")]
    settings, passes = tables.settings_table(study, verdicts), tables.passes_table(study)
    if passes is None and any(run.final is not None for run in study.runs):
        settings = replace(settings, note=f"{settings.note} {ONE_SAMPLE}")
    others = (tables.axes_table(study, verdicts), tables.slices_table(study), passes, tables.best_of_n_table(study))
    return Report(
        name=study.name,
        question=study.question,
        summary=summary_of(verdicts, study),
        lead=lead_of(study),
        legend=legend_of(study, verdicts),
        verdicts=verdicts,
        facts=facts_of(study),
        warnings=[*warnings_of(study), *study.notes, *carried],
        figures=figures_of(study),
        tables=[settings, *(table for table in (*others, health_table(study)) if table is not None)],
        log=tables.log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=[*tables.details_of(study), Detail("Method", text=filled("method.txt.j2"))],
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


PROBLEMS_SHOWN, SETTINGS_SHOWN = 4, 6  # at most
SHOWN = ("problem_id", "response", "outcome")  # fields of a response
OUTCOMES = {"correct": "correct", "format1_wrong": "wrong", "format0": "no format"}
LONGEST = 600  # characters of a response
Rows = dict[str, tuple[dict[str, Any], int]]  # problem -> the row of its first response, and its line


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
    saved = sorted(next(iter(files.values()))) if files else []
    chosen, cases = _choose(list(runs.values())), []
    steps = list(dict.fromkeys([saved[0], saved[len(saved) // 2], saved[-1]])) if saved else []
    rows = {(step, label): _responses(files[label].get(step), chosen) for step in steps for label in runs}
    for problem in chosen:
        by_step: dict[int, list[ShownResponse]] = {step: [] for step in steps}
        for (step, label), of_problems in rows.items():
            if problem in of_problems:
                row, line = of_problems[problem]
                where = f"{Path(*files[label][step].path.parts[-3:])}:{line}"
                outcome = OUTCOMES[category_of(row | {"format_reward": row.get("format_reward") or 0})]
                by_step[step].append(ShownResponse(label, outcome, shown_text(row["response"]), where))
        if by_step and all(by_step.values()):
            row = next(of_problems[problem][0] for of_problems in rows.values() if problem in of_problems)
            cases.append(Case(shown_text(str(row.get("question"))), shown_text(str(row.get("gold"))), by_step))
    return cases


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


def _responses(file: ResponseFile | None, problems: Sequence[str]) -> Rows:
    """Return the first response to each of these problems, with its line."""
    rows: Rows = {}
    try:
        lines = each_line(file.path, lambda row: lacks(row, SHOWN), lambda _: None, without_ids) if file else ()
        for number, row in lines:
            if row["problem_id"] in problems:
                rows.setdefault(row["problem_id"], (row, number))
            if len(rows) == len(problems):
                break
    except ConfigError:  # reading the study has reported it
        return {}
    return rows


def shown_text(text: str) -> str:
    """Return at most LONGEST characters of a text.

    >>> shown_text("x" * 601)[-23:]
    'x ... 1 more characters'
    """
    return text[:LONGEST] + (f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else "")
