"""Whether a run by itself answers a question: its settings are the question's, and its model has not been trained."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlreason.records.files import CONFIG, STATUS
from rlreason.records.reader import setting_in
from rlreason.report.assignment.courses import Course, Question
from rlreason.report.assignment.gather import algorithm_of
from rlreason.runtime.json_fields import number

BUILT_IN = "stories"  # how the names of the data begin on which a question is rehearsed
REHEARSED = "_short"  # how the names of the prompts end that are the others' for the built-in model
TRAINING = ("grpo", "sft", "ei")


def plain(value: Any) -> str:
    """A setting's value as the questions have it: the built-in model's shorter form of a prompt is the prompt.

    >>> plain("r1_zero_short"), plain(None), plain(1.0)
    ('r1_zero', 'null', '1')
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return "null" if value is None else str(value).removesuffix(REHEARSED)


def unfit(
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    summary: Mapping[str, Any],
    question: Question,
    course: Course,
    starts: Collection[str],
) -> str:
    """Why such a run does not answer a question; "" where nothing tells against it.

    `starts`: hashes of the weights that training runs of this model began with.
    """
    for key in question.settings:
        wanted = [plain(settings.get(one[1:])) if one.startswith("$") else one for one in question.values(key)]
        if key in settings and plain(settings[key]) not in wanted:
            return f"{key}={plain(settings[key])}, and asked for is {' or '.join(wanted)}"
    data, name = str(settings.get("data.name")), str(settings.get("model.name"))
    if data != course.data and not data.startswith(BUILT_IN):
        return f"its data is {data}, and asked for is {course.data_name}"
    if not name.startswith(course.model) and name not in ("tiny", "local"):
        return f"its model is {name}, and asked for is {course.model_name}"
    if by := trained_by(settings, provenance):
        return f"its model was trained before it began, by {by}"
    weights = setting_in(provenance, "model.start_weights")
    if settings.get("model.path") and weights and starts and weights not in starts:
        return "its model is not the one that the training runs began with"
    asked, there = number(summary.get("eval_problems")), number(setting_in(summary, "data_sizes.validation"))
    if question.whole and asked is not None and there is not None and asked < there:
        return f"it asked {asked:.0f} of {there:.0f} problems, and asked for are all"
    return ""


def trained_by(settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """The run that left the model which a run starts from; "" where it is no run's, or none that trained."""
    path = settings.get("model.path")
    place = Path(str(provenance.get("directory") or ".")) / Path(str(path)).expanduser()
    for folder in (place, *place.parents)[:4] if path else ():
        if (folder / CONFIG).is_file() and (folder / STATUS).is_file():
            return str(folder) if algorithm_of(folder) in TRAINING else ""
    return ""
