"""Every sentence that a verdict can have, from answers that call for it, and none that goes further than they do."""

import re
from dataclasses import replace

import numpy as np
import pytest
from report_objects import answered

from rlreason.report.content import Series, Verdict
from rlreason.report.sections import facts_of, warnings_of
from rlreason.report.study import Answers, Study
from rlreason.report.verdicts import summary_of, verdicts_of

PROBLEMS = 200
Right = dict[int, np.ndarray | None]  # seed -> which problems are right; None: it diverged without an answer


def hits(share: float, flips: int = 0, problems: int = PROBLEMS) -> np.ndarray:
    """The first `share` of the problems right, but for some of the last right ones."""
    right = np.arange(problems) < round(share * problems)
    right[max(0, right.sum() - flips) : right.sum()] = False
    return right


def verdict_of(study: Study) -> Verdict:
    (verdict,) = verdicts_of(study)
    return verdict


def seeds(share: float, flips: tuple[int, ...] = (0, 1, 2, 3), problems: int = PROBLEMS, first: int = 0) -> Right:
    return {seed: hits(share, flip, problems) for seed, flip in enumerate(flips, first)}


RNG = np.random.default_rng(3)
SOME = RNG.random(PROBLEMS) < 0.5, RNG.random(PROBLEMS) < 0.53

#: What A and its reference R got right -> the verdict's word, beginning of its small line, and parts of its sentence.
CASES: dict[str, tuple[Right, Right, str, str, tuple[str, ...]]] = {
    "better": (seeds(0.7, (0, 2, 1, 3)), seeds(0.5), "better", "4 paired seeds · 200 problems · p ",
               ("A is better than R by 20.0 ",)),
    "worse": (seeds(0.5, (0, 2, 1, 3)), seeds(0.7), "worse", "4 paired seeds", ("A is worse than R by 20.0 ",)),
    "more seeds would settle it": (
        seeds(0.54, (12, 0, 9, 1)), seeds(0.5, (0, 9, 2, 12)), "cannot tell", "4 paired seeds",
        ("A and R cannot be told apart", " seeds would settle ")),
    "more problems would": (
        dict.fromkeys(range(4), SOME[1]), dict.fromkeys(range(4), SOME[0]), "cannot tell", "4 paired seeds",
        ("would not settle it: more problems",)),
    "of few problems nothing is small": (
        seeds(0.5, (1, 0), 8), seeds(0.5, (0, 1), 8), "cannot tell", "2 paired seeds · 8 ",
        ("More seeds and problems",)),
    "equivalence has a width": (
        seeds(0.5, (1, 0, 3, 2), 2000), seeds(0.5, problems=2000), "same", "4 paired seeds",
        ("No difference larger than 2 points",)),
    "one seed compares models": (
        {0: hits(0.8)}, {0: hits(0.5)}, "cannot tell", "one seed on a side",
        ("not the settings", "Model A is better than R by 30.0 ")),
    "one seed beside several": (
        seeds(0.7), {0: hits(0.5)}, "cannot tell", "one seed on a side",
        ("Model A, seed 0 is better", "R lacks seeds 1, 2, 3.")),
    "two seeds": (seeds(0.6, (12, 0)), seeds(0.5, (0, 9)), "cannot tell", "2 paired seeds",
                  ("Two seeds never settle",)),
    "other seeds": (
        seeds(0.7, (5, 6, 7), first=5), seeds(0.5, (0, 1, 2)), "better", "3 or more seeds, unpaired", ("not paired",)),
    "a seed lacks": (seeds(0.7, (0, 1, 2)), seeds(0.5), "better", "3 paired seeds",
                     ("A lacks seed 3.", "Compared on the 3 ")),
    "all right": (seeds(0.99, (0,) * 4), seeds(0.99, (0,) * 4), "same", "", ("Both are above 95%",)),
    "all wrong": (seeds(0.005, (0,) * 4), seeds(0.005, (0,) * 4), "same", "", ("Both are below 2%",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_says_what_the_answers_allow_and_no_more(name: str):
    a, r, word, small, parts = CASES[name]
    verdict = verdict_of(answered(R=r, A=a))
    assert verdict.word == word
    assert verdict.small.startswith(small)
    assert all(part in verdict.sentence for part in parts), verdict.sentence
    if word in ("cannot tell", "same"):
        assert not re.search("^A (is|looks) ", verdict.sentence)
        assert ("cannot separate them" in verdict.sentence) == name.startswith("all ")
    assert bool(verdict.by_seed) == ("paired seeds" in verdict.small or "one seed" in verdict.small)


def test_a_clear_interval_that_holm_refuses_is_no_direction():
    clear = seeds(0.54, (0, 5, 0, 3))
    study = answered(R=seeds(0.5, (0, 1, 0, 1)), A=clear, **{f"B{k}": seeds(0.5, (k, 9, 2, 7)) for k in range(8)})
    first = verdicts_of(study)[0]
    assert (first.difference.low > 0, first.word) == (True, "cannot tell")
    assert "correcting for 9 comparisons" in first.sentence
    assert verdict_of(answered(R=seeds(0.5, (0, 1, 0, 1)), A=clear)).word == "better"  # alone, it is


@pytest.mark.parametrize("lost", [1, 4])
def test_divergence_is_counted_as_it_is(lost: int):
    right: Right = {seed: None if seed < lost else hits(0.5, seed) for seed in range(4)}
    study = answered(R=seeds(0.5), A=right)
    verdict = verdict_of(study)
    assert (verdict.word, verdict.sentence[:22]) == ("diverged", f"A diverged in {lost} of 4 s")
    assert verdict.outcome == ("worse" if lost == 4 else "cannot tell")  # one of four: the interval holds zero
    assert ("Counted as it is" in verdict.sentence) == (lost == 4)
    assert summary_of([verdict], study) == f"A diverges{'' if lost == 4 else ' in some seeds'}."
    assert f"A itself diverged in {lost} of 4 " in verdict_of(answered(A=right, R=seeds(0.5))).sentence


STATES = {
    "stopped:plateau": "Seed 2 of A was ended at step 17 (stopped:plateau)",
    "failed": "Seed 2 of A failed at step 17 of 40",
    "interrupted": "Seed 2 of A stopped at step 17 of 40",
    "waiting": "Seed 2 of A does not enter: it has not begun",
    "running": "Seed 2 of A does not enter: it is still running",
}


@pytest.mark.parametrize("status", STATES)
def test_a_run_that_did_not_finish_says_how_it_enters(status: str):
    study = answered(R=seeds(0.5), A=seeds(0.7))
    run = study.settings[1].runs[2]
    run.status, run.totals = status, {"step": 17.0}
    if status in ("waiting", "running"):
        run.final, run.accuracy = None, None
    assert STATES[status] in verdict_of(study).sentence


def test_other_problems_and_runs_under_way_are_not_compared():
    study = answered(R=seeds(0.5), A=seeds(0.7))
    for run in study.settings[1].runs:
        run.final = Answers({name: replace(p, question="Why?") for name, p in run.final.problems.items()}, 40)
    verdict = verdict_of(study)
    assert (verdict.word, "what problem p0 asks" in verdict.sentence) == ("not compared", True)
    for run in study.settings[1].runs:
        run.status, run.final, run.accuracy = "running", None, None
    assert summary_of(verdicts_of(study), study) == "A is still running."
    assert "still running" in verdict_of(study).sentence
    assert "4 runs still running" in dict(facts_of(study))["Budget"]


def test_a_summary_says_every_word_once_and_no_more_than_the_verdicts_below_it():
    study = answered(
        R=seeds(0.5, problems=2000), A=seeds(0.7, problems=2000), B=seeds(0.5, (1, 0, 3, 2), problems=2000),
        C=seeds(0.52, (90, 0, 70, 5), problems=2000), D=seeds(0.2, problems=2000), E=dict.fromkeys(range(4)),
    )  # fmt: skip
    summary = summary_of(verdicts_of(study), study)
    assert re.findall(r"[A-E] \w+ \w+", summary) == ["A beats R", "B is as", "C cannot be", "D is worse"]
    assert "E diverges" in summary
    one_seed = answered(R={0: hits(0.5)}, A={0: hits(0.8)})  # whose models may differ where settings cannot be judged
    assert summary_of(verdicts_of(one_seed), one_seed) == "A cannot be judged by one seed against R."


def test_rows_that_repeat_a_question_do_not_narrow_an_interval():
    a, b = seeds(0.5, (0, 1, 2), 16), seeds(0.7, (0, 2, 3), 16)
    plain = verdict_of(answered(a=a, b=b)).difference
    study = answered(**{key: {s: np.repeat(of[s], 8) for s in of} for key, of in (("a", a), ("b", b))})
    for run in study.runs:
        problems = run.final.problems
        renamed = {p: replace(of, question=f"What is {k // 8}?") for k, (p, of) in enumerate(problems.items())}
        run.final = replace(run.final, problems=renamed)
    repeated = verdict_of(study).difference
    assert (repeated.problems, repeated.mean, repeated.half) == pytest.approx((16, plain.mean, plain.half))


def test_copied_seeds_are_warned_of():
    assert next(warnings_of(answered(R=seeds(0.5, (0, 0, 0, 0)), A=seeds(0.1)))).startswith("All 4 seeds of R ")


def test_runs_that_are_equal_in_every_seed_are_said_to_be_and_need_no_more_seeds():
    """Two names of one formula: more seeds were asked for, to settle a difference that cannot be."""
    study = answered(a=seeds(0.5), b=seeds(0.5))
    for run in study.runs:
        run.series = {"train/grad_norm": Series({"step": np.arange(3.0)}, np.array([1.0, 2.0, 3.0 + run.seed]))}
    verdict = verdict_of(study)
    assert "equal bit for bit in all seeds" in verdict.sentence
    assert (verdict.word, verdict.outcome) == ("same", "same")
    run.series = {"train/grad_norm": Series({"step": np.arange(3.0)}, np.array([1.0, 2.0, np.nextafter(6.0, 7.0)]))}
    assert "bit for bit" not in verdict_of(study).sentence
    assert "bit for bit" not in verdict_of(answered(a=seeds(0.5), b=seeds(0.5))).sentence
