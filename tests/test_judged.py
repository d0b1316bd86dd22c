"""What an evaluation keeps of a response gives the figures of the whole sample, and a grown file is whole or absent."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlreason.engines.base import Sampling
from rlreason.evaluation.accuracy import eval_metrics, figures_of, mismatches_of
from rlreason.evaluation.cases import categories, ungraded
from rlreason.records.files import growing
from rlreason.types import Grade, Response, Sample


def samples() -> list[Sample]:
    found = []
    for i in range(12):
        ids = [i % 5, i, 7][: i % 4]
        response = Response(
            f"p{i // 3}", [1, 2], ids, [-0.1 * i] * len(ids), f"text {i}", "length" if i % 5 else "stop"
        )
        grade = Grade(1.0, float(i % 2), float(i % 2), "correct" if i % 2 else "wrong")
        scored = [-0.11 * i - 0.01] * len(ids)
        found.append(Sample(response, grade, grade if i else None, log_probs=scored, entropy=0.5 * i if ids else None))
    return found


@pytest.mark.parametrize("second", [False, True])
def test_figures_of_what_is_kept_are_those_of_the_samples(second):
    whole = [replace(s, prompt_grade=s.grade) for s in samples()] if second else samples()
    kept, mismatches = [figures_of(s) for s in whole], mismatches_of(whole, Sampling(min_tokens=1))
    assert len(mismatches) == sum(max(s.length - 1, 0) for s in whole)
    assert eval_metrics(kept, mismatches) == eval_metrics(whole, mismatches)
    assert (categories(kept), ungraded(kept)) == (categories(whole), ungraded(whole))
    assert [k.log_prob for k in kept] == [math.fsum(s.log_probs or []) for s in whole]


def test_a_grown_file_is_there_when_it_is_whole_and_a_failure_leaves_nothing(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    with growing(path) as add:
        for number in range(3):
            add({"number": number, "part": part} for part in range(2))
            assert not path.exists()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"number": number, "part": part} for number in range(3) for part in range(2)]
    before = path.read_bytes()

    def interrupted() -> None:
        with growing(path) as add:
            add([{"number": 9}])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["rows.jsonl"]
