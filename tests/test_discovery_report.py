"""The report of discover runs: what it says follows from the logs, and nothing in a log can break or bend it."""

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.discovery.log import Call, Log, Record, Reply, Turn, read_log
from rlreason.discovery.report import draws_of, runs_below, settings_of, write_report
from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import pass_at
from rlreason.records.files import CONVERSATION as NAME
from rlreason.runtime.statistics import best_of, best_of_interval, rank_sum_p, smallest_p

RECORD = [Record(438, "laminated lattice", "greedy"), Record(582, "axes and a code"), Record(868, "upper bound")]
HOSTILE = (
    "</details><script>alert(1)</script>\n````\n# Mine\n## Reflection\n```\n~~~\n| a | b |\n[x](http://evil.test) "
    "<img src=x onerror=alert(1)> \x1b[2J\0\u202e\u2028 $E=mc^2$ @everyone www.evil.test <!-- "
)
PROGRAM = "points = [[2, 0], [0, 2]]\n"
SETTINGS = {"replies": 1, "temperature": 0.7, "hints": False, "history": 0, "budget": {"calls": 20, "tokens": None}}
TOO_CLOSE = {"error": "Minimum squared distance 36 < maximum squared norm 40", "error_kind": "too_close"}
SCORES = st.lists(st.integers(0, 1000), min_size=1, max_size=7)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def verdict(score: int) -> dict[str, Any]:
    """A verifier's result: a valid set, or one whose points are too close."""
    result = {"score": score, "validity": float(score > 0), "raw_points": max(score, 5), "dimension": 11, "error": None}
    result |= {"min_squared_distance": 4, "max_squared_norm": 4, "protections": {"bwrap": "no network"}}
    pair = {"first": 0, "second": 1, "vectors": [[6, 2], [2, 6]]}
    return result if score else result | TOO_CLOSE | {"worst_pair": pair}


def start(program: str, score: int, result: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"program": program, "program_sha256": sha(program), "score": score, "result": result}


def turn(number: int, score: int | None, kind: str = "first", sample: int = 0, failed: Sequence[str] = ()) -> Turn:
    """A turn of a log: `score` 0 is an invalid set, None a reply without a program; `failed`: calls before its last."""
    program = None if score is None else f"# {number}.{sample}\n{PROGRAM}"
    outcomes = [*failed, "no_code" if score is None else "ok"]
    calls = [Call(f"{number}.{sample}.{k}", one, 10, 20, "by the server") for k, one in enumerate(outcomes, 1)]
    prompt = "Find many vectors." if kind == "first" else f"Turn {number}: try again."
    about = {"turn": number, "sample": sample, "prompt": prompt, "prompt_kind": kind, "calls": calls}
    about |= {"sees": [] if kind == "first" else [f"{number - 1}.0"], "reply": Reply(f"Here:\n{program}", None, "stop")}
    result = None if score is None else verdict(score)
    return Turn(**about, program=program, program_sha256=program and sha(program), result=result)


def log(strategy: Any, seed: int, turns: list[Turn], **over: Any) -> Log:
    """A whole log, whose totals follow from its turns; replies say the seed, as no two seeds' are alike."""
    best = {"score": 22, "turn": "start", "program_sha256": sha("starter")}
    for one in turns:
        one.reply = Reply(f"{one.content}\nseed {seed}")
        if one.credit > best["score"]:
            best = {"score": one.credit, "turn": one.id, "program_sha256": one.program_sha256}
    calls = sum(len(one.calls) for one in turns)
    told: dict[str, Any] = {
        "problem": "kissing_11", "title": "Kissing number in dimension 11", "strategy": strategy, "model": "Qwen3-32B",
        "seed": seed, "settings": SETTINGS, "first_prompt": "Find many vectors.", "record": RECORD, "best": best,
        "spent": {"calls": calls, "prompt_tokens": 10 * calls, "completion_tokens": 20 * calls, "cost": 0.0},
        "start": start("starter", 22, verdict(22)), "turns": turns, "ended": "budget.calls=20 are spent",
    }  # fmt: skip
    return Log(**told | over)


def run(strategy: str, seed: int, scores: Sequence[int | None], **over: Any) -> Log:
    """A run: every turn of `simple` asks the first prompt, and only the first one of `refine`."""
    turns = [turn(k, one, "first" if k == 1 or strategy == "simple" else "extend") for k, one in enumerate(scores, 1)]
    return log(strategy, seed, turns, **over)


simple, refine = partial(run, "simple"), partial(run, "refine")


def saved(folder: Path, told: Log) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(told.text())
    return folder


def report_of(folder: Path, told: Log) -> str:
    write_report([saved(folder, told)], folder)
    return (folder / "report.md").read_text()


@given(SCORES.flatmap(lambda x: st.tuples(st.just(x), st.integers(1, len(x)))))
def test_the_best_of_k_is_the_mean_over_all_subsets_and_of_zeros_and_ones_pass_at_k(case):
    scores, k = case
    every = [max(subset) for subset in itertools.combinations(scores, k)]
    assert best_of(scores, k) == pytest.approx(sum(every) / len(every))
    low, high = best_of_interval(scores, [1, k], draws=40)
    assert min(scores) <= low[0] + 1e-9 <= high[0] + 2e-9 <= high[1] + 3e-9 <= max(scores) + 4e-9
    right = [score % 2 for score in scores]
    assert best_of(right, k) == pytest.approx(pass_at(len(right), sum(right), k))
    with pytest.raises(ValueError, match="k must lie between 1 and m"):
        best_of(scores, len(scores) + 1)


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


ELSEWHERE = {"problem": "/home/me/my problem", "title": "", "start": start("/home/me/mine.py", 22)}
INVALID = {"start": start("mine.py", 0, verdict(0)), "best": {"score": 0, "turn": "start", "program_sha256": ""}}
BUSY = refine(0, [0, None, 44, 0, 438])
BUSY.turns[3].calls.insert(0, Call("4.0.0", "http_429"))
HAPPENED = ["from 22 (starter) to 438 in 6 calls, of which 2", "| call | http\\_429 |", "| program | too\\_close |"]
HAPPENED += [sha(BUSY.turns[4].program or ""), "438 (laminated lattice)", "582 (axes and a code)", "budget.calls=20"]
#: name -> (log, figures and names that its report has)
SAID: dict[str, tuple[Log, list[str]]] = {
    "what happened": (BUSY, HAPPENED),
    "under way": (refine(0, [], ended=None, record=[]), ["has not ended", "22\\*"]),
    "an invalid start": (refine(0, [0, 0], **INVALID), ["36 &lt; maximum squared norm 40", "\\[6, 2\\]", "it is 438"]),
    "a private place": (refine(0, [44], **ELSEWHERE), ["# my problem: refine", "22 (mine.py) to 44", "--problem P"]),
}


@pytest.mark.parametrize(("told", "said"), SAID.values(), ids=SAID)
def test_a_report_says_what_happened_and_what_is_odd_about_a_run(told, said, tmp_path):
    written = report_of(tmp_path, told)
    assert [words for words in said if words not in written] == []
    assert "/home/me" not in written
    headings = ["Methodology", "Process", "Final result", "Where the record stands", "Seeds", "Reflection"]
    assert re.findall("^## (.*)$", written, re.MULTILINE) == headings
    assert (str(tmp_path) in written, (tmp_path / "score.png").stat().st_size > 5000) == (False, True)


def test_the_reflection_is_kept_to_the_byte_and_one_in_a_prompt_is_none(tmp_path):
    prompt = "```\n## Reflection\nThe prompt's.\n```\n# x\n## Reflection\nThe prompt's.\n"
    told = refine(0, [44], first_prompt=prompt)
    assert report_of(tmp_path, told).count("## Reflection") == 3
    path = tmp_path / "report.md"
    own = "## Reflection\r\n\r\nIt w\u00f6rked.\n\n```\nan open fence\n\n## Notes\n\nMore.".encode() + b"\xff\0"
    path.write_bytes(path.read_bytes().rpartition(b"## Reflection")[0] + own)
    for _ in range(2):
        write_report([saved(tmp_path, told)], tmp_path)
        assert path.read_bytes().endswith(own)
        assert path.read_bytes().count(b"## Reflection") == 3
    path.write_bytes(own.replace(b"Reflection", b"Reflexion"))  # the reader's text is not lost with its heading
    write_report([saved(tmp_path, told)], tmp_path)
    assert b"Reflexion" in (tmp_path / "report_before.md").read_bytes()


def outside_fences(written: str) -> str:
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
    return "\n".join(outside)


def test_texts_of_others_stay_texts(tmp_path):
    over = {"model": HOSTILE, "title": HOSTILE, "unit": HOSTILE, "ended": HOSTILE, "system": HOSTILE}
    over |= {"first_prompt": HOSTILE * 9, "settings": SETTINGS | {HOSTILE: HOSTILE}, "start": start(HOSTILE, 22)}
    for name in ("a", "b"):
        told = refine(ord(name), [0, 44, None, 438], record=[Record(44, HOSTILE, HOSTILE)], **over)
        for one in told.turns:
            one.prompt = one.prompt_kind = one.calls[0].outcome = HOSTILE
            one.reply = Reply(HOSTILE * (3 if name == "a" else 2))
            if one.result:
                one.result |= {"error_kind": HOSTILE, "error": HOSTILE * 9, "protections": {HOSTILE: HOSTILE}}
        saved(tmp_path / name, told)
    saved(tmp_path / HOSTILE.replace("/", "").replace("\0", "")[:60], refine(0, [44], **over))
    for folders, out in (([tmp_path / "a"], tmp_path / "a"), (runs_below(tmp_path), tmp_path)):
        write_report(folders, out)
        written = (out / "report.md").read_text()
        outside = outside_fences(written)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]", written)
        assert not re.search(r"<\w|<!--|</|(?<!\\)\]\(http|https?://|(?<!\\)[@$]|www\.", outside)
        headings = [line for line in outside.splitlines() if re.match(r"\s{0,3}(#|=+$|-+$|~~~|```)", line)]
        assert len(headings) == 8
        for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
        assert (out / "score.png").stat().st_size > 5000
        assert len(written) < 20_000


def test_a_draw_is_one_call_of_the_bare_first_prompt_and_only_those_of_one_kind_are_put_together():
    assert draws_of(log("refine", 0, [turn(1, 44, failed=["http_429", "empty"]), turn(2, 438, "extend")])) == [0, 0, 44]
    many = simple(0, [0, None, 44, 300])
    many.turns[2].sees = ["1.0"]
    many.turns[3].calls.append(Call("x", "interrupted"))
    assert draws_of(many) == [0, 0, 0, 300]
    logs = [simple(0, [44, 0]), simple(1, [22]), refine(0, [100, 438]), simple(0, [300], model="other")]
    hotter, more = SETTINGS | {"temperature": 1.0}, SETTINGS | {"replies": 8, "budget": {"calls": 5}}
    over = {"first_prompt": "Another."}, {"settings": hotter}, {"settings": more}
    logs += [simple(2, [score], **one) for score, one in zip((200, 210, 212), over, strict=True)]
    found = settings_of(logs)
    assert sorted({tuple(one.draws) for one in found}) == [(44, 22, 22, 100, 212), (200,), (210,), (300,)]
    labels = [one.label for one in found]
    assert (len(set(labels)), labels[0]) == (6, "refine")
    assert all("model=" in label and "temperature=" in label for label in labels[1:])


def test_few_seeds_or_draws_tell_nothing_and_enough_of_them_do():
    plenty = [simple(seed, [0, 44, 22, 100, 0, 44 + seed]) for seed in range(5)]
    high = [refine(seed, [0, 44, 220, 300, 438, 500 + seed]) for seed in range(5)]
    low = [refine(seed, [0, 0, 0, 0, 0, 23 + seed]) for seed in range(5)]
    undrawn, few = [log("refine", 0, [turn(1, 44, "extend")])], (plenty + high[:1], plenty[:1] + high[:2], high)
    told = [(plenty + high, "better"), (plenty + low, "worse"), ([refine(0, [])], "itself"), (undrawn, "no draws")]
    for logs, word in (*told, *((logs, "cannot tell") for logs in few)):
        words = {one.label: one.word for one in settings_of(logs)}
        assert (words["refine"], words.get("simple", "itself")) == (word, "itself")


def test_several_runs_are_a_distribution_and_never_their_best_alone(tmp_path):
    rng = random.Random(0)
    for seed in range(6):
        climb = sorted(rng.choices([44, 220, 300, 438, 582], k=9))
        saved(tmp_path / f"refine_{seed}", refine(seed, [0, None, 0, *climb]))
        saved(tmp_path / f"simple_{seed}", simple(seed, rng.choices([0, 0, None, 22, 44, 100, 220], k=12)))
    saved(tmp_path / "simple_0" / "inner", refine(9, [44]))  # within a run: none of these
    saved(tmp_path / ".hidden", refine(2, [44]))
    copied = refine(0, [0, None, 0, *climb])  # of the last one
    for one, original in zip(copied.turns, read_log(tmp_path / "refine_5").turns, strict=True):
        one.reply = original.reply
    saved(tmp_path / "zcopy", copied)
    (tmp_path / "out").mkdir()
    told = write_report(runs_below(tmp_path), tmp_path / "out")
    written = (tmp_path / "out" / "report.md").read_text()
    assert f"{tmp_path}/refine_0: " in told.text
    finals = [read_log(tmp_path / f"refine_{seed}").best["score"] for seed in range(6)]
    (row,) = re.findall(r"^\| refine \| 6 \|.*", written, re.MULTILINE)
    assert f"| {', '.join(map(str, finals))} |" in row
    assert f"| {min(finals)}-{max(finals)} |" in row
    assert "exact rank test against 6 groups of 12 draws" in written
    assert "zcopy (seed 0) repeats refine\\_5 (seed 5)" in written  # and is no seed
    saved(tmp_path / "b", refine(0, [44], problem="caps"))
    with pytest.raises(ConfigError, match=r"of 2 problems \(caps, kissing_11\)"):
        write_report([tmp_path / "refine_0", tmp_path / "b"], tmp_path)
