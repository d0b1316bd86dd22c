"""Every verdict from answers that call for it, how rarely equal settings have a direction, and what is covered."""

import itertools
import os
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_objects import answered

from rlreason.report.content import Series, Verdict
from rlreason.report.sections import facts_of, warnings_of
from rlreason.report.study import COMPARING, Study, half
from rlreason.report.verdicts import best_of, effects_of, summary_of, verdicts_of
from tests.settings_of_nothing import arms

Right = dict[int, np.ndarray | None]  # seed -> which problems are right; None: it diverged without an answer


def hits(share: float, flips: int = 0, problems: int = 200) -> np.ndarray:
    """The first `share` of the problems right, but for some of the last right ones."""
    right = np.arange(problems) < round(share * problems)
    right[max(0, right.sum() - flips) : right.sum()] = False
    return right


def seeds(share: float, flips: tuple[int, ...] = (0, 1, 2, 3), problems: int = 200, first: int = 0) -> Right:
    return {seed: hits(share, flip, problems) for seed, flip in enumerate(flips, first)}


def verdict_of(study: Study) -> Verdict:
    return verdicts_of(study)[0]


def test_effects_of_two_keys():
    """Bug: what both keys change together counts for one of them, or a value is left out of a mean."""
    shares = {"00": 0.4, "01": 0.45, "02": 0.5, "10": 0.5, "11": 0.7, "12": 0.6}
    flips = itertools.permutations((0, 1, 2, 3))
    study = answered(**{name: seeds(share, next(flips)) for name, share in shares.items()})
    for one in study.settings:
        one.key = (("g.p", one.label[0]), ("q", one.label[1]))
    study.axes = ["g.p", "q"]
    found = {(what, how): (round(d.mean, 6), d.seeds, d.low < d.mean < d.high) for what, how, d in effects_of(study)}
    looked = [d.p for *_, d in effects_of(replace(study, max_seeds=8))]
    assert all(p > d.p for p, (_, _, d) in zip(looked, effects_of(study), strict=True) if d.p < 1)
    wanted = {"p=1": 0.15, "q=1": 0.125, "q=2": 0.1, "p=1 q=1": 0.15, "p=1 q=2": 0.0}
    assert found == {(what, "together" if " " in what else "alone"): (d, 4, True) for what, d in wanted.items()}
    for one in study.settings:
        one.key = (("g.p", one.label[0]), ("p", one.label[1]))
    study.axes = ["g.p", "p"]
    assert {"g.p=1", "p=2"} <= {what for what, _, _ in effects_of(study)}  # two keys that end alike
    study.settings.pop()  # no whole grid
    assert effects_of(study) == []


RNG = np.random.default_rng(3)
SOME, EVEN = (RNG.random(200) < 0.5, RNG.random(200) < 0.53), (0, 0, 0, 0)
OPEN, ALONE = ("cannot tell", "4 paired seeds"), ("cannot tell", "one seed on a side")

#: What A and its reference R got right -> the verdict's word, beginning of its small line, and parts of its sentence.
CASES: dict[str, tuple[Right, Right, str, str, tuple[str, ...]]] = {
    "better": (seeds(0.7, (0, 2, 1, 3)), seeds(0.5), "better", "4 paired seeds · 200 problems · p ", ("20.0 ",)),
    "worse": (seeds(0.5, (0, 2, 1, 3)), seeds(0.7), "worse", "4 paired seeds", ("20.0 ",)),
    "seeds lack": (seeds(0.54, (12, 0, 9, 1)), seeds(0.5, (0, 9, 2, 12)), *OPEN, (" seeds would settle ",)),
    "problems lack": (dict.fromkeys(range(4), SOME[1]), dict.fromkeys(range(4), SOME[0]), *OPEN, (": more problems",)),
    "few problems": (seeds(0.5, (1, 0), 8), seeds(0.5, (0, 1), 8), OPEN[0], "2 paired seeds · 8 ", ("take four",)),
    "a width": (seeds(0.5, (1, 0, 3, 2), 2000), seeds(0.5, problems=2000), "same", "4 paired seeds", ("2 points",)),
    "one seed": ({0: hits(0.8)}, {0: hits(0.5)}, *ALONE, ("Model A is better than R by 30.0 ",)),
    "one beside several": (seeds(0.7), {0: hits(0.5)}, *ALONE, ("Model A is", "1 seed that they share: 0.")),
    "two seeds": (seeds(0.6, (12, 0)), seeds(0.5, (0, 9)), OPEN[0], "2 paired seeds", ("Two seeds say little",)),
    "other seeds": (seeds(0.7, (5, 6, 7), first=5), seeds(0.5, (0, 1, 2)), "better", "3 or more", ("not paired",)),
    "a seed lacks": (seeds(0.7, (0, 1, 2)), seeds(0.5), "better", "3 paired", ("3 seeds that they share: 0, 1, 2",)),
    "all right": (seeds(0.99, EVEN), seeds(0.99, EVEN), "same", "", ("above 95%",)),
    "all wrong": (seeds(0.005, EVEN), seeds(0.005, EVEN), "same", "", ("below 2%",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str):
    """Bug: a verdict names a direction that the answers do not settle, or does not say what would."""
    a, r, word, small, parts = CASES[name]
    verdict = verdict_of(answered(R=r, A=a))
    assert (verdict.word, verdict.small[: len(small)]) == (word, small)
    assert all(part in verdict.sentence for part in parts), verdict.sentence
    if word in ("cannot tell", "same"):
        assert not re.search("^A (is|looks) ", verdict.sentence)
        assert ("cannot separate them" in verdict.sentence) == name.startswith("all ")
    assert bool(verdict.by_seed) == ("paired seeds" in verdict.small or "one seed" in verdict.small)


def test_holm():
    """Bug: among many settings the luckiest is called better."""
    clear, even = seeds(0.54, (0, 5, 0, 3)), seeds(0.5, (0, 1, 0, 1))
    first = verdict_of(answered(R=even, A=clear, **{f"B{k}": seeds(0.5, (k, 9, 2, 7)) for k in range(8)}))
    assert (first.difference.low > 0, first.word, "9 comparisons" in first.sentence) == (True, "cannot tell", True)
    assert verdict_of(answered(R=even, A=clear)).word == "better"  # alone, it is


@pytest.mark.parametrize("lost", [1, 4])
def test_divergence(lost: int):
    """Bug: diverged seeds are left out of the mean, or not named."""
    right: Right = {seed: None if seed < lost else hits(0.5, seed) for seed in range(4)}
    study = answered(R=seeds(0.5), A=right)
    verdict = verdict_of(study)
    assert (verdict.word, verdict.sentence[:22]) == ("diverged", f"A diverged in {lost} of 4 s")
    assert verdict.outcome == ("worse" if lost == 4 else "cannot tell")  # one of four: the interval holds zero
    assert ("accuracy points below R" in verdict.sentence) == (lost == 4)
    assert summary_of([verdict], study) == f"A diverges{'' if lost == 4 else ' in some seeds'}."
    assert f"A itself diverged in {lost} of 4 " in verdict_of(answered(A=right, R=seeds(0.5))).sentence


def test_unfinished_runs_and_other_problems():
    """Bug: a run that broke off enters a comparison unsaid, or answers to other problems with equal ids do."""
    study = answered(R=seeds(0.5), A=seeds(0.7))
    run = study.settings[1].runs[2]
    for status in ("stopped:plateau", "failed", "interrupted", "waiting", "running"):
        run.status, run.totals = status, {"step": 17.0}
        run.final = {} if status in ("waiting", "running") else run.final
        says = f"ended at step 17 ({status})" if run.final else f"does not enter ({status})"
        assert f"Seed 2 of A {says}" in verdict_of(study).sentence
    study.settings[1].runs[0].provenance = {"own_functions": {"loss=mine:f": "a"}}
    study.settings[1].runs[1].provenance = {"own_functions": {"loss=mine:f": "b"}}  # edited between two seeds
    assert "The source of loss=mine:f is not the same" in verdict_of(study).sentence
    study = answered(R=seeds(0.5), A=seeds(0.7))
    for run in study.settings[1].runs:
        run.final = {name: replace(p, question="Why?") for name, p in run.final.items()}
    assert (verdict_of(study).word, "problem p0" in verdict_of(study).sentence) == ("not compared", True)
    for run in study.settings[1].runs:
        run.status, run.final = "running", {}
    assert summary_of(verdicts_of(study), study) == "A is still running."
    assert "4 runs still running" in dict(facts_of(study))["Budget"]


def test_summary():
    """Bug: the headline says more than the verdicts below it."""
    study = answered(
        R=seeds(0.5, problems=2000), A=seeds(0.7, problems=2000), B=seeds(0.5, (1, 0, 3, 2), problems=2000),
        C=seeds(0.52, (90, 0, 70, 5), problems=2000), D=seeds(0.2, problems=2000), E=dict.fromkeys(range(4)),
    )  # fmt: skip
    found = re.findall(r"[A-E] \w+(?: \w+)?", summary_of(verdicts_of(study), study))
    assert found == ["A beats R", "B is as", "C cannot be", "D is worse", "E diverges"]
    one_seed = answered(R={0: hits(0.5)}, A={0: hits(0.8)})  # whose models may differ where settings cannot be judged
    assert summary_of(verdicts_of(one_seed), one_seed) == "A cannot be judged by one seed against R."
    alone = answered(R=seeds(0.5))
    whole = summary_of([], alone)
    alone.runs[0].status = "interrupted"
    assert ("broken off" in whole, "1 of them broken off" in summary_of([], alone)) == (False, True)


def test_repeated_questions():
    """Bug: rows that repeat a question narrow the interval."""
    a, b = seeds(0.5, (0, 1, 2), 16), seeds(0.7, (0, 2, 3), 16)
    plain = verdict_of(answered(a=a, b=b)).difference
    study = answered(**{key: {s: np.repeat(of[s], 8) for s in of} for key, of in (("a", a), ("b", b))})
    for run in study.runs:
        run.final = {p: replace(of, question=f"What is {k // 8}?") for k, (p, of) in enumerate(run.final.items())}
    repeated = verdict_of(study).difference
    assert (repeated.problems, repeated.mean, repeated.half) == pytest.approx((16, plain.mean, plain.half))


def test_seeds_of_one_model():
    """Bug: a second seed of evaluations, more responses of the same two models, makes their difference unclear."""
    rng = np.random.default_rng(0)
    a, b = ({seed: rng.random(1000) < share for seed in (0, 1)} for share in (0.5, 0.57))
    study = answered(a=a, b=b)
    assert verdict_of(study).outcome == "cannot tell"
    for run in study.runs:
        run.settings, run.summary = {"algorithm": "evaluate"}, {"weights": f"of {run.setting}"}
    verdict = verdict_of(study)
    assert (verdict.outcome, verdict.difference.half < 0.05, verdict.by_seed) == ("better", True, {})
    assert verdict_of(replace(study, max_seeds=8)).outcome == "cannot tell"  # its looks count seeds
    study.runs[0].summary = {"weights": "of another model"}  # a model for each seed: of trainings
    assert verdict_of(study).outcome == "cannot tell"


def test_clusters():
    """Bug: a lead in one subject of five is taken for one in any other."""
    k = np.arange(200)
    r = {seed: (k % 2 == 0) | (k == 4 * seed + 1) for seed in range(4)}
    a = {seed: (k % 2 == 0) | (k < 40 - seed) for seed in range(4)}
    for fact, outcome in (("level", "better"), ("subject", "cannot tell")):
        study = answered(R=r, A=a)
        for run in study.runs:
            run.final = {p: replace(of, facts={fact: f"{n // 40}"}) for n, (p, of) in enumerate(run.final.items())}
        verdict = verdict_of(study)
        assert (verdict.outcome, verdict.clusters) == (outcome, "5 subjects" * (fact == "subject"))
        assert ("On problems of these 5 subjects alone" in verdict.sentence) == (fact == "subject")
        assert verdict.sentence.count("problems of more subjects would") == (fact == "subject")
    for run in study.runs:
        run.final = {p: replace(of, facts={fact: f"{n > 180}"}) for n, (p, of) in enumerate(run.final.items())}
    assert (verdict_of(study).clusters, "too few subjects" in "".join(warnings_of(study))) == ("", True)


def test_effects_go_by_clusters():
    """Bug: a lead in one subject of five is an effect of a key."""
    names = ("00", "01", "10", "11")
    study = answered(**{n: {s: (np.arange(200) < 40 * int(n[0])) | hits(0.0, s) for s in range(4)} for n in names})
    study.axes = ["p", "q"]
    for one in study.settings:
        one.key = (("p", one.label[0]), ("q", one.label[1]))
    alone = effects_of(study)[0][2]
    for run in study.runs:
        run.final = {p: replace(of, facts={"subject": f"{n // 40}"}) for n, (p, of) in enumerate(run.final.items())}
    wide = effects_of(study)[0][2]
    assert (alone.low > 0, wide.low > 0, wide.mean) == (True, False, alone.mean)


CELLS = list(itertools.product((2, 3, 4, 8), ((0.03, 0.03), (0.02, 0.05))))  # seeds, and spreads equal or unequal


def study_of(answers) -> Study:
    """A study of settings with these answers (seeds, problems); the first is the reference."""
    return answered(**{f"s{k}": dict(enumerate(of)) for k, of in enumerate(answers)})


def test_copies():
    """Bug: two names of one formula, and more seeds are asked for to settle a difference that cannot be."""
    assert next(warnings_of(answered(R=seeds(0.5, EVEN), A=seeds(0.1)))).startswith("All 4 seeds of R ")
    study = answered(a=seeds(0.5), b=seeds(0.5))
    for run in study.runs:
        run.series = {"train/grad_norm": Series({"step": np.arange(3.0)}, np.array([1.0, 2.0, 3.0 + run.seed]))}
    verdict = verdict_of(study)
    assert (verdict.word, verdict.outcome, "bit for bit" in verdict.sentence) == ("same", "same", True)
    run.series = {"train/grad_norm": Series({"step": np.arange(3.0)}, np.array([1.0, 2.0, np.nextafter(6.0, 7.0)]))}
    assert "bit for bit" not in verdict_of(study).sentence
    for run in study.runs:  # which learned nothing at all
        run.series = {"train/grad_norm": Series({"step": np.arange(3.0)}, np.zeros(3))}
    assert "bit for bit" not in verdict_of(study).sentence


def share_named(studies) -> float:
    """How often a direction is named, in any comparison of a family."""
    return float(np.mean([any(v.outcome in ("better", "worse") for v in verdicts_of(study)) for study in studies]))


def false_share(rng, n: int, seeds: int, spreads: tuple[float, ...]) -> float:
    """How often a direction is named among equal settings."""
    return share_named(study_of(arms(rng, seeds, 256, spreads)) for _ in range(n))


def chosen_share(rng, n: int, seeds: int, spread: float) -> float:
    """How often the best of five equal settings is called better or worse than the best of five others."""
    families = (arms(rng, seeds, 512, (spread,) * 10) for _ in range(n))
    chosen = ([best_of(study_of(answers[k : k + 5])) for k in (0, 5)] for answers in families)
    return share_named(Study("x", "?", [], two, among=half(two, COMPARING)) for two in chosen)


def covered(rng, n: int, seeds: int, spreads: tuple[float, ...]) -> float:
    """How often the interval holds a difference that is known: 5 points."""
    found = [verdict_of(study_of(arms(rng, seeds, 256, spreads, (0.0, 0.05)))).difference for _ in range(n)]
    return float(np.mean([one.low <= 0.05 <= one.high for one in found]))


@pytest.mark.long
def test_calibration():
    """Bug: equal settings get a direction, or intervals hold the truth, more or less often than 5% and 95%.

    A right method of 5% is below 7.1% of 1,000 pairs (three standard errors), pooled over eight cells below 5.7%.
    """
    rng = np.random.default_rng(told := int.from_bytes(os.urandom(4), "big"))
    shares = [false_share(rng, 1000, *cell) for cell in CELLS]
    cover = [covered(rng, 1000, *cell) for cell in CELLS]
    families = [false_share(rng, 1000, s, (0.02, 0.03, 0.03, 0.05, 0.03, 0.02)) for s in (2, 3, 4)]
    best = [chosen_share(rng, 500, s, 0.03) for s in (2, 4)]
    assert max(shares + best) <= 0.071, (told, shares, best)
    assert (np.mean(shares) <= 0.057, np.mean(families) <= 0.08, max(families) <= 0.10) == (True,) * 3, (told, families)
    assert (min(cover) >= 0.93, np.mean(cover) <= 0.97) == (True, True), (told, cover)  # 97% with two seeds


@pytest.mark.long
def test_calibration_of_looks():
    """Bug: adding seeds to what is open tells equal settings apart more often than 5%, or intervals miss the truth."""
    own = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks/verdicts.py"))
    told = int.from_bytes(os.urandom(3), "big")
    cells = itertools.product((4, 6, 8), (256, 1319), (0.0, 2.0, 5.0), (1, 4))
    found = [own["by_looks"](own["Cell"](*cell), [0.0] * settings, 300, told) for *cell, settings in cells]
    false, cover, _, _ = np.mean(found, axis=0)
    assert (false <= 0.057, cover >= 0.94) == (True, True), (told, found)
