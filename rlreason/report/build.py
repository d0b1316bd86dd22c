"""From what was read to what is shown: every section of a report, each text computed from the runs."""

from collections.abc import Sequence

from rlreason.report import words
from rlreason.report.cases import cases_of
from rlreason.report.charts import figures_of, forest_of, legend_of
from rlreason.report.content import Report, Table, Verdict
from rlreason.report.differing import cost_of, details_of, what_differs
from rlreason.report.health import health_of, health_table
from rlreason.report.log import log_of
from rlreason.report.passes import ONE_SAMPLE, best_of_n_table, passes_table
from rlreason.report.remarks import budget_of, warnings_of
from rlreason.report.slices import slices_table
from rlreason.report.study import Study
from rlreason.report.tables import axes_table, settings_table
from rlreason.report.verdicts import EQUAL_WITHIN, verdicts_of
from rlreason.runtime.text import few


def build_report(study: Study, equal_within: float = EQUAL_WITHIN) -> Report:
    """The whole report of a study."""
    verdicts = verdicts_of(study, equal_within)
    return Report(
        name=study.name,
        question=study.question,
        summary=words.summary_of(verdicts, study),
        lead=lead_of(study),
        legend=legend_of(study, verdicts),
        verdicts=verdicts,
        facts=facts_of(study),
        warnings=[*warnings_of(study), *study.notes, *_carried(study)],
        figures=figures_of(study),
        tables=tables_of(study, verdicts),
        log=log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=details_of(study),
        forest=forest_of(verdicts),
    )


def tables_of(study: Study, verdicts: Sequence[Verdict]) -> list[Table]:
    """The settings, two axes, slices, pass@k, best of N: those that there is something to say in."""
    passes = passes_table(study)
    found = [settings_table(study, verdicts), axes_table(study, verdicts), slices_table(study), passes]
    found += [best_of_n_table(study), health_table(study)]
    tables = [table for table in found if table is not None]
    if passes is None and any(run.final is not None for run in study.runs):
        first = tables[0]
        tables[0] = Table(
            first.title, first.head, first.rows, first.numbers, f"{first.note} {ONE_SAMPLE}", first.labels
        )
    return tables


def lead_of(study: Study) -> str:
    """What was compared with what, in two sentences."""
    n, seeds = len(study.settings), {len(one.runs) for one in study.settings}
    each = (
        f"{min(seeds)} seed{'s' * (min(seeds) > 1)} each" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    )
    asked = max((len(run.final.problems) for run in study.runs if run.final is not None), default=0)
    problems = f" of {asked:,} validation problem{'s' * (asked != 1)}" if asked else ""
    if n < 2:
        return f"One setting, {each.removesuffix(' each')}, measured by {study.figure}{problems}."
    reference = study.reference.name
    if any(run.final is not None and not run.ended for run in study.runs):
        problems += " (of a run that ended early, the last one that it reached)"
    chosen = few([one.label for one in study.settings if one.best_of])
    fixed = f"but {chosen} was chosen by its result" if chosen else "nothing was chosen by its result"
    return (
        f"{n} settings of {what_differs(study)}, {each}, compared with {reference} on {study.figure}{problems}. "
        f"That figure is fixed{', ' if chosen else ': '}{fixed}."
    )


def facts_of(study: Study) -> list[tuple[str, str]]:
    """The strip below the first screen."""
    hashes = list(dict.fromkeys(str(run.protocol.get("hash")) for run in study.runs if run.protocol is not None))
    measured = sum(run.protocol is not None for run in study.runs)
    if len(hashes) == 1:
        protocol = f"{hashes[0]}, one for all {measured} runs"
    else:
        protocol = f"{few(hashes, 3)}: they differ" if hashes else "none on record yet"
    overlaps = {str(run.settings.get("data.overlap")) for run in study.runs if run.settings.get("data.overlap")}
    overlap = {"refuse": "none: it is refused", "drop": "dropped from training"}
    return [
        ("Compared", f"each run's {study.figure.removeprefix('the ')}"),
        ("Differs between settings", what_differs(study)),
        ("Budget", budget_of(study)),
        ("Protocol", protocol),
        ("Training and validation overlap", few([overlap.get(word, word) for word in sorted(overlaps)]) or "not known"),
        ("Health", health_of(study)),
        ("Cost", cost_of(study).rstrip(".")),
    ]


def _carried(study: Study) -> list[str]:
    """What `carry=` brought, in its own sentences."""
    return [f"Carried from an earlier sweep: {one.get('sentence', '')}" for one in study.carried if one.get("sentence")]
