"""The leaderboard: accuracy against wall clock, and whether its rules are kept."""

from rlreason.records.files import COMPLIANCE
from rlreason.report.assignment.against import figure_named, leaderboard_figures
from rlreason.report.assignment.bars import interval_of, percent, with_bands, with_interval
from rlreason.report.assignment.gather import last_line
from rlreason.report.assignment.gathered import Gathered, Read
from rlreason.report.assignment.section import Picture, Section
from rlreason.report.chosen import best_of, comparing_half, how_chosen


def leaderboard(section: Section, read: Read, gathered: Gathered) -> None:
    """Its accuracy on problems that did not choose, its curve with the axis ending at 4 h, its compliance."""
    study = read.study
    best = best_of(study)
    several = len(study.settings) > 1
    found = interval_of(best.runs, comparing_half(study.settings) if several else None)
    if found is not None:
        chosen = (
            f" {how_chosen(best.label, len(study.settings)).replace('the verdict', 'this figure')}" if several else ""
        )
        section.lines.append(f"Accuracy: {with_interval(found, len(best.runs))}.{chosen}")
    asked = max((len(run.final.problems) for run in best.runs if run.final is not None), default=0)
    if several and (average := interval_of(best.runs)) is not None:
        section.lines.append(
            f"To be handed in, of {best.label}: {percent(average[0])}, the average over all {asked:,} problems."
        )
    if (figure := figure_named(study, "eval/accuracy")) is not None:
        for drawn in leaderboard_figures(study, with_bands(figure, gathered.course, section.question, study)):
            stem = drawn.name.replace("/", "_")
            section.pictures.append(Picture(stem, drawn, read.report.legend))
    cards = {run.name: last_line(run.folder / COMPLIANCE) for run in best.runs}
    section.lines += [f"Compliance of {name}: {line}" for name, line in cards.items() if line]
    if not any(cards.values()):
        section.lines.append("No run has left a card of compliance: measure it with eval=leaderboard.")
