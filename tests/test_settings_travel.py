"""Settings as records: what a new field enters by itself, and the words to choose from."""

import ast
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlreason.config.groups import GradingConfig, SamplingConfig
from rlreason.config.leaves import leaves
from rlreason.config.rules import wrong_values
from rlreason.config.store import SCHEMAS, typed
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


def test_a_word_that_is_none_of_its_setting_is_refused_wherever_the_setting_stands(composed):
    run = typed(composed("data@eval.data=stories_hard"))
    run.eval.data.bad_gold, run.model.weights = "mend", "int8"
    said = wrong_values(run)
    assert [line.partition(" ")[0] for line in said] == ["model.weights=int8", "eval.data.bad_gold=mend"]
    assert sum("choices" in leaf.metadata for kind in SCHEMAS["schema"].values() for leaf in leaves(kind())) > 30


def test_nobody_but_one_dispatch_asks_which_algorithm_a_run_is():
    """Settings answer for themselves; training/build.py and training/jobs.py make the parts."""
    asks = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "training" or path.stem not in ("build", "jobs")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if isinstance(node.args[0], ast.Name) and node.args[0].id == "run"
    ]
    assert len(asks) <= 3, asks
