"""Samples, collections and steps as plain values that JSON holds exactly, there and back.

A sample that stands in several places, as in the samples of a step and in a batch of it, is written once, so that it is
one object again afterwards.
"""

from dataclasses import fields, replace
from typing import Any

from rlreason.progress.step import Step
from rlreason.types import Collected, Grade, Response, Sample, Update

Plain = dict[str, Any]


def shallow(record: Any) -> Plain:
    """The fields of a dataclass by name, their values as they are."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def plain_sample(sample: Sample) -> Plain:
    """A sample in plain values: JSON keeps every float to the last digit."""
    second = sample.prompt_grade
    return shallow(sample) | {
        "response": shallow(sample.response),
        "grade": shallow(sample.grade),
        "prompt_grade": None if second is None else shallow(second),
    }


def sample_from(plain: Plain) -> Sample:
    """The sample that `plain_sample` was given."""
    second = plain["prompt_grade"]
    parts = {
        "response": Response(**plain["response"]),
        "grade": Grade(**plain["grade"]),
        "prompt_grade": None if second is None else Grade(**second),
    }
    return Sample(**(plain | parts))


def to_show(sample: Sample) -> Sample:
    """The sample without what no reader of its text needs: token ids and log-probabilities."""
    response = replace(sample.response, prompt_ids=[], token_ids=[], log_probs=[])
    return replace(sample, response=response, log_probs=None, old_log_probs=None, reference_log_probs=None)


def plain_collected(collected: Collected) -> Plain:
    """A collection: every sample once, and where each stands."""
    places: dict[int, int] = {}
    pool: list[Sample] = []

    def placed(samples: list[Sample]) -> list[int]:
        for sample in samples:
            if id(sample) not in places:
                places[id(sample)] = len(pool)
                pool.append(sample)
        return [places[id(sample)] for sample in samples]

    found = {"samples": placed(collected.samples), "batches": [placed(batch) for batch in collected.batches]}
    rest = {"metrics": collected.metrics, "notices": collected.notices, "restart": collected.restart}
    return {"pool": [plain_sample(sample) for sample in pool], **found, **rest}


def collected_from(plain: Plain) -> Collected:
    """The collection that `plain_collected` was given."""
    pool = [sample_from(row) for row in plain["pool"]]
    return Collected(
        samples=[pool[place] for place in plain["samples"]],
        batches=[[pool[place] for place in batch] for batch in plain["batches"]],
        metrics=plain["metrics"],
        notices=plain["notices"],
        restart=plain["restart"],
    )


def plain_step(step: Step) -> Plain:
    """A step with the updates that it has taken."""
    return {
        "number": step.number,
        "weight_version": step.weight_version,
        "collected": plain_collected(step.collected),
        "updates": [shallow(update) for update in step.updates],
    }


def step_from(plain: Plain) -> Step:
    """The step that `plain_step` was given."""
    updates = [Update(**update) for update in plain["updates"]]
    return Step(plain["number"], collected_from(plain["collected"]), plain["weight_version"], updates)
