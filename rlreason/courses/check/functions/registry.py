"""What is checked of each function, by the handouts' names."""

from collections.abc import Callable
from typing import Any

from rlreason.courses.check.functions import advantages, losses, scoring, steps
from rlreason.courses.check.subject import Subject, year_of

SUBJECTS: tuple[Subject, ...] = (
    *scoring.SCORING,
    *advantages.REWARDS,
    *advantages.ADVANTAGES,
    *losses.LOSSES,
    *losses.AVERAGES,
    *steps.MICRO_BATCH_STEPS,
    *steps.TRAIN_STEPS,
)


def subject_of(name: str, function: Callable[..., Any], course: str) -> Subject:
    """What is checked of a function: by its own parameters where they tell the year, else of this course."""
    year = year_of(name, function) or course
    of_name = [subject for subject in SUBJECTS if subject.name == name]
    return next((subject for subject in of_name if year in subject.course.split()), of_name[0])
