"""What lays two algorithms side by side: expert iteration against SFT, GRPO's entropy beside expert iteration's."""

from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.report.assignment.against import figure_named, side_by_side
from rlreason.report.assignment.gathered import Gathered, Read
from rlreason.report.assignment.metrics import cell
from rlreason.report.assignment.section import Picture, Section
from rlreason.report.compare import compared_study
from rlreason.report.content import Table
from rlreason.report.study import Setting
from rlreason.report.verdicts import verdicts_of

SFT, EI, ON_POLICY = "sft_dataset_size", "expert_iteration", "grpo_learning_rate"
ENTROPY = "eval/entropy"  # measured alike in all runs, over the responses to validation problems


def against_sft(section: Section, read: Read, gathered: Gathered) -> None:
    """The verdict of expert iteration against SFT, on the default setting of each, and expert iteration's own gain."""
    section.lines += across_steps(read)
    sft = gathered.sweep(SFT)
    if sft is None:
        section.lines.append(f"Against SFT: the sweep {SFT} has not run, so that nothing is compared.")
        return
    try:
        study = compared_study([folder_of(sft), folder_of(read)])
    except ConfigError as error:
        section.problems.append(str(error))
        return
    for one, name in zip(study.settings, ("SFT", "expert iteration"), strict=True):
        one.label = name
    asked = (
        f"Expert iteration ({read.study.reference.label}) against SFT ({sft.study.reference.label}), which learns from "
        "given traces"
    )
    section.verdicts.append((asked, verdicts_of(study)))


def folder_of(read: Read) -> Path:
    """The reference of a sweep as `compare` takes it: SWEEP/KEY=VALUE,..."""
    words = [f"{key}={value}" for key, value in read.study.reference.key]
    return read.found.path / ",".join(words) if words else read.found.path


def across_steps(read: Read) -> list[str]:
    """What the steps of expert iteration brought the reference, step by step."""
    reached: dict[int, list[float]] = {}
    for run in read.study.reference.runs:
        for step, accuracy in dict(run.evaluations).items():
            reached.setdefault(step, []).append(accuracy)
    if len(reached) < 2:
        return []
    seeds = max(map(len, reached.values()))
    said = ", ".join(f"{100 * sum(of) / len(of):.1f}%" for _, of in sorted(reached.items()))
    over = f", mean of {seeds} seeds" if seeds > 1 else ""
    return [f"Across its steps {read.study.reference.name} goes {said} (steps {_steps(reached)}{over})."]


def _steps(reached: dict[int, list[float]]) -> str:
    return ", ".join(str(step) for step in sorted(reached))


def entropy(section: Section, read: Read, gathered: Gathered) -> None:
    """The entropy of GRPO's responses beside expert iteration's: a picture against steps, and first and last values."""
    sides: list[tuple[str, Setting]] = []
    on_policy = gathered.sweep(ON_POLICY)
    if on_policy is not None:
        sides.append(("GRPO, on-policy", on_policy.study.reference))
    sides += [(f"GRPO, {one.label}", one) for one in read.study.settings[1:]]
    ei = gathered.sweep(EI)
    if ei is None:
        section.lines.append(f"Entropy against expert iteration's: the sweep {EI} has not run.")
        return
    sides.append(("expert iteration", ei.study.reference))
    table = entropy_table(sides)
    if table is not None:
        section.tables.append(table)
    study, legend = side_by_side("entropy", "Entropy of GRPO and of expert iteration", sides)
    if (figure := figure_named(study, "entropy")) is not None:
        section.pictures.append(Picture(f"{section.question.id}_entropy_against_ei", figure, legend))


def entropy_table(sides: list[tuple[str, Setting]]) -> Table | None:
    """The entropy of responses to validation problems, at the first and the last evaluation; None without any."""
    rows = []
    for label, one in sides:
        found = [run.series[ENTROPY].y for run in one.runs if ENTROPY in run.series and len(run.series[ENTROPY].y)]
        if found:
            first, last = [float(y[0]) for y in found], [float(y[-1]) for y in found]
            rows.append(
                [
                    label,
                    str(len(found)),
                    cell(first),
                    cell(last),
                    cell([b - a for a, b in zip(first, last, strict=True)]),
                ]
            )
    if not rows:
        return None
    head = ["runs", "seeds", "before training", "at the end", "change"]
    note = "Nats a token, responses to validation problems; mean over seeds, below it the 95% interval over seeds."
    return Table("Entropy: GRPO and expert iteration", head, rows, frozenset({1, 2, 3, 4}), note)
