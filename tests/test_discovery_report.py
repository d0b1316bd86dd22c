"""The report of discover runs: what it says follows from the logs, and nothing in a log can break or bend it."""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.discovery.comparison import draws_of, settings_of
from rlreason.discovery.log import Best, Call, Log, Record, Reply, Result, Spent, Start, Turn, read_log
from rlreason.discovery.report import runs_below, write_report
from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import pass_at
from rlreason.records.files import CONVERSATION as NAME
from rlreason.runtime.intervals import best_of, best_of_curve, best_of_interval, rank_sum_p, smallest_p

RECORD = [
    Record(438, "laminated lattice", "also the greedy set"),
    Record(582, "axes and a code"),
    Record(600, "Station 2026", "integers"),
    Record(868, "upper bound"),
]
HOSTILE = (
    "</details><script>alert(1)</script>\n````\n# Mine\n## Reflection\n```\n~~~\n| a | b |\n[x](http://evil.test) "
    "<img src=x onerror=alert(1)> \x1b[2J\0\u202e\u2028 $E=mc^2$ @everyone www.evil.test <!-- "
)
PROGRAM = "points = [[2, 0], [0, 2]]\n"
SETTINGS = {"replies": 1, "temperature": 0.7, "hints": False, "history": 0, "budget": {"calls": 20, "tokens": None}}
NO_SCORE = {"error": "Minimum squared distance 36 < maximum squared norm 40", "error_kind": "too_close"}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def verdict(score: int, **over: Any) -> Result:
    """A verifier's result: a valid set, or one whose points are too close."""
    result = Result(score=score, validity=float(score > 0), raw_points=max(score, 5), dimension=11, error=None)
    result |= {"min_squared_distance": 4, "max_squared_norm": 4, "protections": {"bwrap": "no network"}}
    if not score:
        result |= {**NO_SCORE, "worst_pair": {"first": 0, "second": 1, "vectors": [[6, 2], [2, 6]]}}
    return result | over


def turn(number: int, score: int | None, kind: str = "first", sample: int = 0, failed: Sequence[str] = ()) -> Turn:
    """A turn of a log: `score` 0 is an invalid set, None a reply without a program; `failed`: calls before its last."""
    program = None if score is None else f"# {number}.{sample}\n{PROGRAM}"
    outcomes = [*failed, "no_code" if score is None else "ok"]
    calls = [Call(f"{number}.{sample}.{k}", outcome, 10, 20, "by the server") for k, outcome in enumerate(outcomes, 1)]
    return Turn(
        turn=number,
        sample=sample,
        sees=[] if kind == "first" else [f"{number - 1}.0"],
        prompt="Find many vectors." if kind == "first" else f"Turn {number}: try again.",
        prompt_kind=kind,
        calls=calls,
        reply=Reply(f"Here:\n```python\n{program}```", None, "stop"),
        program=program,
        program_sha256=program and sha(program),
        result=None if score is None else verdict(score),
    )


def log(strategy: Any, seed: int, turns: list[Turn], **over: Any) -> Log:
    """A whole log, whose totals follow from its turns; replies say the seed, as no two seeds' are alike."""
    best = Best(22, program_sha256=sha("starter"))
    for one in turns:
        one.reply = Reply(f"{one.content}\nseed {seed}")
        if one.credit > best.score:
            best, one.improved = Best(one.credit, one.id, one.program_sha256), True
    calls = sum(len(one.calls) for one in turns)
    told = Log(
        problem="kissing_11",
        title="Kissing number in dimension 11",
        strategy=strategy,
        model="Qwen3-32B",
        seed=seed,
        settings=SETTINGS,
        first_prompt="Find many vectors.",
        start=Start("starter", sha("starter"), 22, verdict(22)),
        turns=turns,
        spent=Spent(calls, 10 * calls, 20 * calls),
        best=best,
        record=RECORD,
        ended="budget.calls=20 are spent",
    )
    for name, value in over.items():
        setattr(told, name, value)
    return told


def simple(seed: int, scores: Sequence[int | None], **over: Any) -> Log:
    """A run of `simple`: every turn asks the first prompt."""
    return log("simple", seed, [turn(k + 1, score) for k, score in enumerate(scores)], **over)


def refine(seed: int, scores: Sequence[int | None], **over: Any) -> Log:
    """A run of `refine`: only its first turn asks the first prompt."""
    kinds = ["first", *("extend" if score else "no_code" if score is None else "error" for score in scores)]
    return log("refine", seed, [turn(k + 1, *one) for k, one in enumerate(zip(scores, kinds, strict=False))], **over)


def saved(folder: Path, told: Log, program: str | None = None) -> Path:
    """A run's folder with such a log, and its program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(told.text())
    if program is not None:
        (folder / "program.py").write_text(program)
    return folder


def read(tmp_path: Path, logs: Sequence[Log]) -> list[Log]:
    """The logs as they are read from their folders."""
    return [read_log(saved(tmp_path / str(k), one)) for k, one in enumerate(logs)]


def report_of(folder: Path, told: Log, program: str | None = None) -> str:
    """The text of the report of a run with such a log, written into its folder."""
    return write_report([saved(folder, told, program)], folder).read_text()


def outside_fences(written: str) -> list[str]:
    """The lines of a Markdown text that are not within a fence; none may be left open."""
    fence, outside = "", []
    for line in written.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif found := re.match(r"(`{3,})\w+$", line):
            fence = found[1]
        else:
            outside.append(line)
    assert not fence
    return outside


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that look at score.png; the others, of the text, are spared half a second for each."""


@pytest.fixture(autouse=True)
def text_alone(request, monkeypatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("rlreason.discovery.report.draw", lambda *_: None)


# The best of k draws


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=7).flatmap(
        lambda x: st.tuples(st.just(x), st.integers(1, len(x)))
    )
)
def test_the_best_of_k_is_the_mean_over_all_subsets(case):
    scores, k = case
    every = [max(subset) for subset in itertools.combinations(scores, k)]
    assert best_of(scores, k) == pytest.approx(sum(every) / len(every))


def test_of_zeros_and_ones_it_is_pass_at_k():
    for n, correct, k in ((10, 3, 4), (200, 1, 50), (2000, 5, 1000), (7, 7, 7), (7, 0, 3)):
        assert best_of([1] * correct + [0] * (n - correct), k) == pytest.approx(pass_at(n, correct, k))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_the_curve_rises_from_the_mean_to_the_largest_score_and_its_interval_holds_no_more(scores):
    curve = best_of_curve(scores)
    assert curve[0] == pytest.approx(sum(scores) / len(scores))
    assert curve[-1] == pytest.approx(max(scores))
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(curve))
    low, high = best_of_interval(scores, [1, len(scores)], draws=50)
    assert (low <= high + 1e-9).all()
    assert min(scores) - 1e-9 <= low.min()
    assert high.max() <= max(scores) + 1e-9


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """Draws of a known distribution: 5 with chance 0.2, else 0; the best of 4 is expected to be 5 (1 - 0.8^4)."""
    rng, truth, hits = random.Random(0), 5 * (1 - 0.8**4), 0
    for seed in range(200):
        low, high = best_of_interval([5 * (rng.random() < 0.2) for _ in range(60)], [4], seed, draws=200)
        hits += low[0] <= truth <= high[0]
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize("k", [0, -1, 3])
def test_more_draws_than_there_are_have_no_best(k):
    with pytest.raises(ValueError, match="k must lie between 1 and m"):
        best_of([1, 2], k)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_the_rank_test_counts_every_split(a, b):
    """Ties are given the mean of their ranks; compared are doubled ranks, which are whole."""
    together = sorted([*a, *b])
    rank = {value: 2 * together.index(value) + together.count(value) + 1 for value in together}
    seen, n = sum(rank[value] for value in a), len(a)
    sums = [sum(rank[value] for value in split) for split in itertools.combinations([*a, *b], n)]
    tails = sum(s <= seen for s in sums) / len(sums), sum(s >= seen for s in sums) / len(sums)
    assert rank_sum_p(a, b) == pytest.approx(min(1.0, 2 * min(tails)))
    assert rank_sum_p(a, b) == pytest.approx(rank_sum_p(b, a))
    assert rank_sum_p(a, b) >= smallest_p(len(a), len(b)) - 1e-12


def test_the_rank_test_is_that_of_scipy_where_nothing_is_equal():
    stats, rng = pytest.importorskip("scipy.stats"), random.Random(0)
    for n, m in ((3, 5), (6, 9), (10, 40)):
        values = rng.sample(range(1000), n + m)
        expected = stats.mannwhitneyu(values[:n], values[n:], method="exact").pvalue
        assert rank_sum_p(values[:n], values[n:]) == pytest.approx(expected)
    assert rank_sum_p(range(5), range(10, 15)) == pytest.approx(smallest_p(5, 5))


# Reading


def test_a_log_is_read_as_it_was_written_with_its_curve(tmp_path):
    told = refine(3, [0, 44, None, 438])
    told.turns[1].calls.insert(0, Call("2.0.0", "http_429"))
    found = read_log(saved(tmp_path, told))
    told.folder = tmp_path
    assert found == told
    assert found.curve() == ([0, 1, 3, 4, 5], [22, 22, 44, 44, 438])
    assert [found.best_at(calls) for calls in range(6)] == [22, 22, 22, 44, 44, 438]
    assert found.best_result == told.turns[3].result


def test_a_valid_set_with_an_alarm_is_worth_nothing(tmp_path):
    told = refine(0, [44, 1000])
    told.best = Best(44, "1.0")
    told.turns[1].result = verdict(1000, validity=0.0, error_kind="alarm", error="above the bound", alarm="above")
    assert "| set | alarm |" in report_of(tmp_path, told)
    assert read_log(tmp_path).curve()[1] == [22, 44, 44]


@pytest.mark.parametrize("content", [b"", b'{"problem": "kissing', b"\xff\xfe\x00", b"[]", b"{}", b"[" * 100_000])
def test_a_file_that_is_no_log_is_named_in_one_line(content, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="is no log of a discover run") as raised:
        read_log(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / NAME))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("best", {"score": -1, "turn": "1.0"}, "best.score"),
        ("turns", [{"turn": 1}], "turns[0]"),
        ("model", {"\x1b[2J": "\u202e"}, ".model"),
        ("strategy", "greedy", ".strategy"),
    ],
)
def test_a_field_of_another_type_is_named(part, value, said, tmp_path):
    fields = json.loads(refine(0, [22, 44]).text())
    (tmp_path / NAME).write_text(json.dumps(fields | {part: value}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_log(tmp_path)


# The report of one run


def test_the_report_of_a_run_says_what_happened(tmp_path, drawn):
    told = refine(0, [0, None, 44, 0, 438])
    told.turns[3].calls.insert(0, Call("4.0.0", "http_429"))
    program = told.turns[4].program
    written = report_of(tmp_path, told, program)
    assert (tmp_path / "score.png").read_bytes().startswith(b"\x89PNG")
    assert re.findall("^## (.*)$", written, re.MULTILINE) == [
        "Methodology", "Process", "Final result", "Where the record stands", "Seeds", "Reflection",
    ]  # fmt: skip
    for words in (
        "from 22 (starter) to 438 in 6 calls, of which 5 gave a reply and 2 a valid set",
        "came with call 6",
        "| call | http\\_429 | the endpoint refused it with status 429 | 1 |",
        "| set | too\\_close | two of its points are too close, or equal | 2 |",
        "| valid set | better than before |  | 2 |",
        "- too\\_close: Minimum squared distance 36 &lt; maximum squared norm 40",
        "**turn 5.0: 44 to 438**",
        f"SHA-256 `{sha(program or '')}`. In its set the largest squared norm is 4 and the smallest",
        "rlreason score RUN/program.py\n",
        "reaches 438 (laminated lattice); the next above it is 582 (axes and a code)",
        "budget.calls=20",
    ):
        assert words in written
    assert "has another one" not in written
    assert report_of(tmp_path / "b" / "c", told, program) == written
    assert str(tmp_path) not in written


ELSEWHERE = {"problem": "/home/me/my problem", "title": "", "start": Start("/home/me/mine.py", None, 22)}
#: name -> (log, what its report says)
SAID: dict[str, tuple[Log, list[str]]] = {
    "under way": (
        refine(0, [], ended=None, record=[]),
        ["has not ended", "No call", "No reply", "the program that the run began with", "names no records", "22\\*"],
    ),
    "an invalid start": (
        refine(0, [0, 0], start=Start("mine.py", sha("x"), 0, verdict(0)), best=Best(0)),
        ["36 &lt; maximum squared norm 40", '"vectors": \\[\\[6, 2\\], \\[2, 6\\]\\]', "next above it is 438"],
    ),
    "a score that no verdict gives": (refine(0, [44], best=Best(600, "1.0")), ["do not trust it"]),
    "another problem": (refine(0, [44], problem="caps"), ["rlreason score RUN/program.py --problem PROBLEM\n"]),
    "a private place": (refine(0, [44], **ELSEWHERE), ["# my problem: refine", "from 22 (mine.py) to 44"]),
    "no program": (refine(0, [44]), ["no readable program.py"]),
}


@pytest.mark.parametrize(("told", "said"), SAID.values(), ids=SAID)
def test_a_report_says_what_is_odd_about_a_run(told, said, tmp_path):
    written = report_of(tmp_path, told)
    assert [words for words in said if words not in written] == []
    assert "/home/me" not in written


def test_a_program_that_is_not_the_one_of_the_log_is_told(tmp_path):
    assert f"has another one**, `{sha('points = []')}`" in report_of(tmp_path, refine(0, [44]), "points = []")


# What was written into it


def test_the_reflection_is_kept_to_the_byte(tmp_path):
    report_of(tmp_path, refine(0, [44]))
    report = tmp_path / "report.md"
    own = "## Reflection\r\n\r\nIt w\u00f6rked.\n\n```\nan open fence\n\n## Notes\n\nMore.".encode() + b"\xff\0"
    report.write_bytes(report.read_bytes().partition(b"## Reflection")[0] + own)
    for _ in range(2):
        write_report([saved(tmp_path, refine(0, [44, 438]))], tmp_path)
        assert report.read_bytes().endswith(own)
        assert b"to 438 in 2 calls" in report.read_bytes()
        assert report.read_bytes().count(b"## Reflection") == 1


def test_a_reflection_in_a_reply_is_not_the_reflection(tmp_path):
    told = refine(0, [44])
    told.turns[0].reply = Reply("```\n## Reflection\nThe model's.\n```\n# x\n## Reflection\nThe model's.\n")
    first = report_of(tmp_path, told)
    assert first.count("## Reflection") == 3
    (tmp_path / "report.md").write_text(first + "Mine.\n")
    assert report_of(tmp_path, told) == first + "Mine.\n"


def test_a_report_of_somebody_else_is_kept_below(tmp_path):
    (tmp_path / "report.md").write_text("# My own report\n")
    for _ in range(2):
        assert report_of(tmp_path, refine(0, [44])).endswith("written again._\n\n# My own report\n")


def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ConfigError, match=r"report\.md"):
        report_of(tmp_path, refine(0, [44]))


# Texts of others


def test_texts_of_others_stay_texts(tmp_path, drawn):
    over = {"model": HOSTILE, "title": HOSTILE, "unit": HOSTILE, "ended": HOSTILE, "system": HOSTILE}
    over |= {"first_prompt": HOSTILE, "settings": SETTINGS | {HOSTILE: HOSTILE}, "start": Start(HOSTILE, score=22)}
    record = [Record(44, HOSTILE, HOSTILE)]
    for name in ("a", "b"):
        told = refine(ord(name), [0, 44, None, 438], record=record, **over)
        for one in told.turns:
            one.prompt = one.prompt_kind = HOSTILE
            one.reply = Reply(HOSTILE * (3 if name == "a" else 2))
            one.calls[0].outcome = HOSTILE
            if one.result:
                one.result |= {"error_kind": HOSTILE, "error": HOSTILE, "protections": {HOSTILE: HOSTILE}}
        saved(tmp_path / name, told)
    saved(tmp_path / HOSTILE.replace("/", "").replace("\0", "")[:60], refine(0, [44], **over))
    for folders, out in (([tmp_path / "a"], tmp_path / "a"), (runs_below([tmp_path]), tmp_path)):
        written = write_report(folders, out).read_text()
        outside = "\n".join(outside_fences(written))
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]", written)
        assert not re.search(r"<\w|<!--|</", outside)
        assert not re.search(r"(?<!\\)\]\(http|https?://|(?<!\\)[@$]|www\.", outside)
        headings = [line for line in outside.splitlines() if re.match(r"\s{0,3}(#|=+$|-+$|~~~|```)", line)]
        assert [line.lstrip("# ") for line in headings[1:]] == [
            "Methodology", "Process", "What came of it", "The prompts and replies that moved the score most",
            "Final result", "Where the record stands", "Seeds", "Reflection",
        ]  # fmt: skip
        for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
        assert (out / "score.png").stat().st_size > 5000


def test_a_long_reply_is_cut_to_a_page(tmp_path):
    told = refine(0, [44, 100, 220, 438])
    for one in told.turns:
        one.prompt = "x\n" * 50_000 + "y" * 50_000
        one.reply = Reply(one.prompt)
        assert one.result is not None
        one.result["error"] = "z" * 5000
    written = report_of(tmp_path, told)
    assert len(written) < 12_000
    assert len(written.splitlines()) < 250
    assert written.count("**turn ") == 3


# The baseline, and seeds


def test_a_draw_is_one_call_of_the_bare_first_prompt():
    assert draws_of(log("refine", 0, [turn(1, 44, failed=["http_429", "empty"]), turn(2, 438, "extend")])) == [0, 0, 44]
    many = simple(0, [0, None, 44, 300])
    many.turns[2].sees = ["1.0"]
    many.turns[3].calls.append(Call("x", "interrupted"))
    assert draws_of(many) == [0, 0, 0, 300]


def test_the_baseline_is_the_best_of_the_start_and_k_draws():
    scores = [0, None, 44, 438, 0, 10]
    log_ = simple(0, scores)
    (panel,) = panels_of([log_], settings_of([log_]))
    values = [max(22, score or 0) for score in scores]
    for k in range(1, 7):
        every = [max(subset) for subset in itertools.combinations(values, k)]
        assert panel.expected([k])[0] == pytest.approx(sum(every) / len(every))
    assert panel.groups(2) == [22, 438, 22]
    assert panel.groups(4) == [438]


def test_only_draws_of_one_kind_are_put_together(tmp_path):
    logs = [simple(0, [44, 0]), simple(1, [22]), refine(0, [100, 438]), simple(0, [300], model="other")]
    logs.append(simple(2, [200], first_prompt="Another."))
    logs.append(simple(2, [210], settings={**SETTINGS, "temperature": 1.0}))
    logs.append(simple(2, [212], settings={**SETTINGS, "replies": 8, "budget": {"calls": 5}}))
    found = read(tmp_path, logs)
    draws = [panel.draws for panel in panels_of(found, settings_of(found))]
    assert sorted(draws) == [(44, 22, 22, 100, 212), (200,), (210,), (300,)]


def words_of(logs: Sequence[Log]) -> dict[str, str]:
    """How each setting compares with its baseline."""
    return {one.setting.label: one.word for one in compared(panels_of(logs, settings_of(logs)))}


def test_few_seeds_or_draws_tell_nothing_and_enough_of_them_do():
    plenty = [simple(seed, [0, 44, 22, 100, 0, 44 + seed]) for seed in range(5)]
    high = [refine(seed, [0, 44, 220, 300, 438, 500 + seed]) for seed in range(5)]
    low = [refine(seed, [0, 0, 0, 0, 0, 23 + seed]) for seed in range(5)]
    assert words_of(plenty + high) == {"simple": "itself", "refine": "better"}
    assert words_of(plenty + low) == {"simple": "itself", "refine": "worse"}
    assert words_of(plenty + high[:1]) == {"simple": "itself", "refine": "cannot tell"}
    assert words_of(plenty[:1] + high[:2]) == {"simple": "itself", "refine": "cannot tell"}
    assert words_of(high) == {"refine": "cannot tell"}
    assert words_of([log("refine", 0, [])]) == {"refine": "itself"}
    assert words_of([log("refine", 0, [turn(1, 44, "extend")])]) == {"refine": "no draws"}


def test_refinement_that_does_nothing_is_rarely_called_better():
    """Runs whose later turns are draws of the same distribution as the first ones: any verdict on them is wrong."""
    rng, wrong = random.Random(0), 0
    for _ in range(60):
        logs = []
        for seed in range(4):
            logs.append(simple(seed, [rng.choice([0, 0, 44, 100, 300]) for _ in range(6)]))
            logs.append(refine(seed, [rng.choice([0, 0, 44, 100, 300]) for _ in range(6)]))
        wrong += words_of(logs)["refine"] != "cannot tell"
    assert wrong <= 6


def test_settings_are_told_apart_by_what_differs():
    logs = [refine(0, [44]), refine(1, [44]), simple(0, [22]), refine(0, [44], model="other")]
    logs += [refine(0, [44], settings={**SETTINGS, "temperature": 1.0}), refine(0, [44], first_prompt="Another.")]
    labels = {setting.label: len(setting.logs) for setting in settings_of(logs)}
    assert labels.pop("simple") == 1
    assert labels.pop("refine, model=other, temperature=0.7") == 1
    assert labels.pop("refine, model=Qwen3-32B, temperature=1.0") == 1
    assert sorted(labels.values()) == [1, 2]


def test_several_runs_are_a_distribution_and_never_their_best_alone(tmp_path, drawn):
    rng = random.Random(0)
    for seed in range(6):
        climb = sorted(rng.choice([44, 220, 300, 438, 582]) for _ in range(9))
        saved(tmp_path / f"refine_{seed}", refine(seed, [0, None, 0, *climb]))
        draws = [rng.choice([0, 0, None, 22, 44, 100, 220]) for _ in range(12)]
        saved(tmp_path / f"simple_{seed}", simple(seed, draws))
    for seed in range(3):
        many = [turn(1 + k // 4, rng.choice([0, 44, 220, 240]), sample=k % 4) for k in range(12)]
        saved(tmp_path / f"best_of_n_{seed}", log("best_of_n", seed, many))
    written = write_report(runs_below([tmp_path]), tmp_path / "out").read_text()
    assert ": 15 runs with simple, best\\_of\\_n, refine\n" in written
    finals = [read_log(tmp_path / f"refine_{seed}").best.score for seed in range(6)]
    row = next(line for line in written.splitlines() if line.startswith("| refine | 6 |"))
    assert f"| {', '.join(map(str, finals))} |" in row
    assert f"| {min(finals)}-{max(finals)} |" in row
    assert "- **refine:** better than independent draws: after 12 calls the 6 seeds have" in written
    assert "- **best\\_of\\_n:** independent draws itself" in written
    assert "exact rank test of 6 seeds against 9 groups of 12 draws" in written
    assert write_report(sorted(tmp_path.glob("*_*")), tmp_path / "out2").read_text() == written


def test_too_few_draws_are_said_with_the_command_that_gives_more(tmp_path):
    runs = [saved(tmp_path / str(seed), refine(seed, [0, 44, 438])) for seed in range(3)]
    written = write_report(runs, tmp_path).read_text()
    assert "3 draws; the expected best is" in written
    assert "cannot tell: after 3 calls the 3 seeds have 438 in the median" in written
    assert "make 1 group of 3: 3 seeds" in written
    runs.append(saved(tmp_path / "long", refine(9, [0] * 30)))
    assert "They reach to 4 calls, and the longest run made 30" in write_report(runs, tmp_path).read_text()


def test_damaged_runs_and_copies_are_left_out_by_name(tmp_path):
    for name, told in (("a", refine(0, [44, 438])), ("b", refine(0, [44, 438])), ("d", refine(1, [44, 100]))):
        saved(tmp_path / name, told)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / NAME).write_text("{}")
    (tmp_path / ".hidden").mkdir()
    written = write_report(runs_below([tmp_path, tmp_path / "a"]), tmp_path).read_text()
    assert "- b (seed 0) has the prompts and replies of a (seed 0)" in written
    assert "- c/conversation\\_log.json is no log of a discover run (" in written
    assert "| refine | 2 | 438, 100 |" in written


def test_runs_that_cannot_stand_in_one_report_are_refused(tmp_path):
    one, other = saved(tmp_path / "a", refine(0, [44])), saved(tmp_path / "b", refine(0, [44], problem="caps"))
    with pytest.raises(ConfigError, match=r"of 2 problems \(caps, kissing_11\)"):
        write_report([one, other], tmp_path)
    (other / NAME).write_text("[]")
    with pytest.raises(ConfigError, match="is no log of a discover run"):
        write_report([other], tmp_path)


def test_kinds_of_draws_have_panels_of_their_own(tmp_path, drawn):
    for k, model in enumerate("abcdef"):
        saved(tmp_path / f"{k}", simple(0, [44, 0, 100], model=model))
    written = write_report(runs_below([tmp_path]), tmp_path).read_text()
    assert "The picture shows 4 of 6 kinds of first calls." in written
    assert "**Independent draws (model=f):** 3 draws" in written


def test_the_picture_bears_no_turns_and_scores_of_any_size(tmp_path, drawn):
    logs = [refine(0, [], ended=None, record=[])]
    for score in (0, 10**15):
        logs.append(simple(0, [score, 0], start=Start("s"), best=Best(score, "1.0")))
        logs[-1].record = [*RECORD, Record(10**14, "x" * 200)]
    for k, told in enumerate(logs):
        report_of(tmp_path / str(k), told)
        assert (tmp_path / str(k) / "score.png").stat().st_size > 5000
