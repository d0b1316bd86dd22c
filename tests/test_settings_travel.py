"""Settings as records: what a new field enters by itself, and the words to choose from."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlreason.config.groups import GradingConfig, SamplingConfig
from rlreason.config.store import typed
from rlreason.evaluation.evaluator import LEFT_OUT, protocol_of
from rlreason.evaluation.protocol import differences
from rlreason.types import Problem

PACKAGE = Path(__file__).resolve().parents[1] / "rlreason"


@dataclass
class NarrowerSampling(SamplingConfig):
    top_p: float = 1.0


def protocol(evaluation):
    return protocol_of(evaluation, [Problem("a", "1+1?", "2")], None)


def test_a_new_number_of_sampling_makes_another_protocol(composed):
    evaluation = typed(composed()).evaluation
    sampling = {f.name: getattr(evaluation.sampling, f.name) for f in fields(SamplingConfig)}
    new = replace(evaluation, sampling=NarrowerSampling(**sampling))
    other = replace(new, sampling=replace(new.sampling, top_p=0.9))
    assert differences(protocol(new), protocol(other)) == ["sampling.top_p: 1.0 and 0.9"]
    other = replace(evaluation, grading=replace(evaluation.grading, rel_tol=0.5))
    assert "grading.rel_tol: " in differences(protocol(evaluation), protocol(other))[0]
    same = replace(evaluation, grading=replace(evaluation.grading, workers=3, memory_mb=512))
    assert protocol(same) == protocol(evaluation)
    kinds = {"grading": GradingConfig, "sampling": SamplingConfig}
    assert set(LEFT_OUT) < {f"{group}.{f.name}" for group, kind in kinds.items() for f in fields(kind)}
