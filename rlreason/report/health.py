"""The health of a report's runs: what `rlreason health` finds in their metrics, seeds of a setting together."""

from rlreason.health.finding import Finding
from rlreason.report.content import Table
from rlreason.report.study import Run, Study

NOTE = "What the monitors find in the recorded metrics, all of them on. For one run with evidence: rlreason health RUN."


def health_of(study: Study) -> str:
    """How many of the runs have something wrong, in words."""
    read = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in read)
    return f"something is wrong in {ill} of {len(read)} runs" if ill else f"nothing is wrong in {len(read)} runs"


def health_table(study: Study) -> Table | None:
    """Each thing that is wrong with the runs of a setting: in how many, where first, why, what to try."""
    rows = []
    for one in study.settings:
        found: dict[str, list[tuple[Run, Finding]]] = {}
        for run in one.runs:
            for finding in filter(lambda finding: finding.problem, run.findings):
                found.setdefault(finding.rule, []).append((run, finding))
        for rule, of_rule in found.items():
            first = min((finding for _, finding in of_rule), key=lambda finding: finding.step or 0)
            seeds, share = ", ".join(str(run.seed) for run, _ in of_rule), f"{len(of_rule)} of {len(one.runs)}"
            rows.append(
                [
                    one.label,
                    f"{rule}\n{first.what}",
                    f"{share}\nseed {seeds}",
                    str(first.step),
                    first.causes,
                    first.cure,
                ]
            )
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    return Table("Health of the runs", head, rows, frozenset({3}), NOTE, frozenset({0})) if rows else None
