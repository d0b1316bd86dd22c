"""The verifier of the shipped problem, exact on good and bad sets, and programs that solve it without a model."""

import json
import random
import subprocess
import sys
from operator import mul
from pathlib import Path

import pytest

from rlreason.discovery.problems.kissing_11.verify import COMPARED, verify
from rlreason.discovery.score import HOME

Rows = list[list[int]]
EXAMPLES = Path(__file__).parents[1] / "examples" / "kissing_11"
STARTER = [[sign if k == i else 0 for k in range(11)] for i in range(11) for sign in (2, -2)]
LOAD_AND_RUN = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['run_code']()))"


def padded(*rows: list[int]) -> Rows:
    """The rows with zeros up to dimension 11."""
    return [row + [0] * (11 - len(row)) for row in rows]


def given_by(program: Path) -> Rows:
    """What a shipped program's `run_code()` returns, in a process of its own; if it printed, this would fail."""
    command = [sys.executable, "-I", "-B", "-c", LOAD_AND_RUN, str(program)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def closest_of(rows: Rows) -> tuple[int, int, int]:
    """The smallest squared distance, with the pair whose second and then first row comes first: by differences."""
    pairs = ((sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)), j, i) for j in range(len(rows))
             for i in range(j))  # fmt: skip
    distance, second, first = min(pairs)
    return distance, first, second


def test_a_valid_set_scores_its_points():
    assert verify(STARTER) == {
        "score": 22, "num_points": 22, "valid": True, "error": None, "error_kind": None, "alarm": None,
        "raw_points": 22, "dimension": 11, "duplicates": 0, "min_squared_distance": 8, "max_squared_norm": 4,
        "worst_pair": {"first": 0, "second": 2, "vectors": padded([2], [0, 2])}, "compared_rows": 22,
    }  # fmt: skip
    alone = verify(padded([0, -3]))
    assert (alone["score"], alone["min_squared_distance"], alone["worst_pair"]) == (1, None, None)


@pytest.mark.parametrize("s", [3, 2**16, 2**32, 2**53, 8_700_000_000_001, 2**64, 10**200 + 7])
def test_equality_is_allowed_and_one_less_is_not_whatever_the_size(s):
    """64-bit integers wrap around and floats round, from 2**16 on: neither may decide. 8.7e12: norms of 26 digits."""
    good = verify(padded([1, s], [2, 0]))
    assert (good["score"], good["min_squared_distance"], good["max_squared_norm"]) == (2, 1 + s * s, 1 + s * s)
    bad = verify(padded([1, s], [1, 0]))
    assert (bad["error_kind"], bad["score"]) == ("too_close", 0)
    assert (bad["min_squared_distance"], bad["max_squared_norm"]) == (s * s, 1 + s * s)
    if s < 10**20:
        assert bad["error"] == f"Minimum squared distance {s * s} < maximum squared norm {1 + s * s}"
    else:
        assert bad["error"].count("100000000000... (401 digits)") == 2
    json.dumps(bad)


@pytest.mark.parametrize(
    ("rows", "kind", "error", "dimension"),
    [
        ([], "empty", "empty", None),
        ([[]], "dimension", "is 0, expected 11", 0),
        ([[*row, 0] for row in STARTER], "dimension", "is 12, expected 11", 12),
        ([*STARTER, [0] * 11], "zero_vector", "Row 22 (counted from 0)", 11),
        ([*STARTER, [2] * 10, []], "ragged", "row 0 has 11 coordinates and row 22 has 10, expected 11", None),
        (STARTER * 455, "size", "10010 points are too many: at most 10000", 11),
        ([[2.0] + [0] * 10], "type", "Row 0 (counted from 0) holds", 11),
        ([*STARTER, [True] * 11], "type", "Row 22 (counted from 0) holds", 11),
        ([*STARTER, STARTER[3], STARTER[0]], "too_close", "Minimum squared distance 0 < maximum squared norm 4", 11),
        # What other evaluators credit: squares that are 0 in 64 bits, and one float64.
        (padded(*([2**32 * k] for k in range(1, 1001))), "too_close", f"distance {2**64}", 11),
        (padded([2**53], [2**53 + 1]), "too_close", f"distance 1 < maximum squared norm {(2**53 + 1) ** 2}", 11),
    ],
)
def test_what_is_no_set_of_vectors_is_told_in_plain_words(rows, kind, error, dimension):
    result = verify(rows)
    assert (result["error_kind"], result["score"], result["num_points"], result["valid"]) == (kind, 0, 0, False)
    assert error in result["error"]
    assert (result["raw_points"], result["dimension"], result["alarm"]) == (len(rows), dimension, None)
    assert (result["worst_pair"] is None) == (kind != "too_close")
    assert kind in ("empty", "type", "size") or result["duplicates"] == len(rows) - len({*map(tuple, rows)})


def test_a_valid_set_above_the_proved_bound_is_an_alarm():
    assert verify(STARTER, upper_bound=22)["score"] == 22
    result = verify(STARTER, upper_bound=21)
    assert (result["error_kind"], result["score"], result["valid"]) == ("alarm", 0, False)
    assert "no valid set in dimension 11 has more than 21" in result["alarm"]
    assert verify([*STARTER, STARTER[0]], upper_bound=21)["error_kind"] == "too_close"  # no alarm for one that is not


def test_the_closest_pair_is_that_of_all_pairs():
    rng = random.Random(0)
    verdicts = []
    for trial in range(300):
        dimension, reach = rng.randint(1, 4), rng.choice([1, 3, 10, 10**9, 10**30])
        rows = [[rng.randint(-reach, reach) for _ in range(dimension)] for _ in range(rng.randint(2, 9))]
        rows = [row for row in rows if any(row)]
        if len(rows) < 2:
            continue
        result = verify(rows, dimension=dimension)
        distance, first, second = closest_of(rows)
        assert result["min_squared_distance"] == distance, (trial, rows)
        assert result["worst_pair"] == {"first": first, "second": second, "vectors": [rows[first], rows[second]]}
        largest = max(sum(map(mul, row, row)) for row in rows)
        assert (result["max_squared_norm"], result["valid"]) == (largest, distance >= largest)
        verdicts.append(result["valid"])
    assert 20 < sum(verdicts) < len(verdicts) - 20  # both kinds were among them


def test_a_set_that_is_far_too_large_is_refused_after_a_part_of_it():
    rng = random.Random(1)
    rows = [[rng.randint(1, 10**30) for _ in range(11)] for _ in range(10_000)]
    rows[COMPARED] = rows[0]  # the first that is not compared any more
    result = verify(rows)
    assert result["error_kind"] == "too_close"
    assert result["error"].endswith(" (among the first 1000 of 10000 points)")
    assert result["compared_rows"] == COMPARED
    assert result["min_squared_distance"] > 0
    assert verify(rows[:COMPARED])["worst_pair"] == result["worst_pair"]


def test_a_large_set_without_a_pair_too_close_is_compared_to_its_end():
    """1,100 words of even weight of length 16 whose places sum to 0 (xor), as signs: squared distances 16 or more."""
    words = [w for w in range(2**16) if w.bit_count() % 2 == 0 and not parity_of_places(w)][: COMPARED + 100]
    rows = [[1 - 2 * (word >> i & 1) for i in range(16)] for word in words]
    good = verify(rows, dimension=16, upper_bound=len(rows))
    assert (good["score"], good["compared_rows"], good["min_squared_distance"]) == (len(rows), len(rows), 16)
    rows[-1] = rows[0]  # the only pair that is too close
    late = verify(rows, dimension=16)
    assert (late["error_kind"], late["min_squared_distance"]) == ("too_close", 0)
    assert (late["worst_pair"]["first"], late["worst_pair"]["second"]) == (0, len(rows) - 1)


def parity_of_places(word: int) -> int:
    """The exclusive or of the places of a word's ones: 0 in the extended Hamming code, beside even weight."""
    places = 0
    for place in (i for i in range(16) if word >> i & 1):
        places ^= place
    return places


LADDER = {
    HOME / "kissing_11" / "starter.py": 22,
    EXAMPLES / "roots_220.py": 220,
    EXAMPLES / "lexicographic_438.py": 438,
    EXAMPLES / "constant_weight_582.py": 582,
    EXAMPLES / "numeric_600.py": 600,
}


@pytest.mark.parametrize(
    "program", [pytest.param(path, marks=[pytest.mark.long] if "numeric" in path.name else []) for path in LADDER]
)
def test_every_program_of_the_ladder_gives_what_it_says(program):
    rows = given_by(program)
    assert {type(x) for row in rows for x in row} == {int}
    result = verify(rows)
    assert (result["score"], result["error"], result["duplicates"]) == (LADDER[program], None, 0)
    assert closest_of(rows)[0] >= max(sum(x * x for x in row) for row in rows) > 0  # once more, in another way
