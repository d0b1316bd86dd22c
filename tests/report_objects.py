"""Studies and reports made by hand: settings with seeds, curves of known shape, and texts that want to be more."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlreason.report.content import Case, Report, Series, Table, Verdict
from rlreason.report.figures import FIGURES, figures_of, forest_of, legend_of
from rlreason.report.study import GradedProblem, Setting, Study, StudyRun
from rlreason.runtime.statistics import paired_difference

METRICS = [one.source or one.name for one in FIGURES[1:]]
HOSTILE = "</script><script>alert(1)</script>\u202e\x1b[2J <b onclick=x> & \u2028 \ud800"


def series_of(steps: np.ndarray, y: np.ndarray, tokens: float = 4000.0) -> Series:
    """A metric that was measured at these steps, with the other axes in proportion."""
    return Series({"step": steps, "time": 2.0 * steps, "tokens": tokens * steps, "updates": steps}, y)


def run_of(label: str, seed: int, level: float, steps: int, metrics: Sequence[str]) -> StudyRun:
    """One run whose accuracy rises towards `level`."""
    rng = np.random.default_rng([seed, int(1000 * level)])
    at, evaluations = np.arange(1.0, steps + 1), np.arange(0.0, steps + 1, 5)
    accuracy = np.clip(level * (1 - np.exp(-evaluations / 40)) + rng.normal(0, 0.02, len(evaluations)), 0, 1)
    series = {"eval/accuracy": series_of(evaluations, accuracy)}
    series |= {name: series_of(at, rng.uniform(0.01, 1, steps)) for name in metrics}
    return StudyRun(Path(label), (), seed, "finished", series=series, planned_steps=steps)


def study_of(
    labels: Sequence[str] = ("1e-5", "3e-5", "1e-4"), seeds: int = 4, steps: int = 200, metrics: Sequence[str] = METRICS
) -> Study:
    """Settings of increasing accuracy, the first being the reference."""
    settings = []
    for label, level in zip(labels, np.linspace(0.4, 0.8, len(labels)), strict=True):
        runs = [run_of(label, seed, float(level), steps, metrics) for seed in range(seeds)]
        settings.append(Setting((("learning_rate", label),), label, runs))
    return Study("learning_rate", "Which learning rate?", ["learning_rate"], settings)


def answered(**settings: Mapping[int, Sequence[bool] | None]) -> Study:
    """Settings with these right answers by seed (None: it diverged without an answer); the first is the reference."""
    made = []
    for name, of in settings.items():
        key, runs = (("x", name),), []
        for seed, right in of.items():
            run = StudyRun(Path(name), key, seed, "finished", planned_steps=40)
            run.totals, run.settings = {"step": 40.0}, {"x": name}
            if right is None:
                run.status, run.summary = "diverged:loss", {"accuracy": None}
            else:
                run.final = {f"p{k}": GradedProblem(f"What is {k}?", float(ok), 1) for k, ok in enumerate(right)}
            runs.append(run)
        made.append(Setting(key, name, runs))
    return Study("s", "Which x?", ["x"], made)


def verdicts_of_hand(study: Study) -> list[Verdict]:
    """A verdict for each setting but the reference, from differences that grow with its place."""
    verdicts = []
    for place, setting in enumerate(study.settings[1:], 1):
        found = paired_difference(np.random.default_rng(place).normal(0.05 * place, 0.2, (4, 100)))
        by_seed = {seed: found.mean + 0.01 * (seed - 1) for seed in range(4)}
        word, label = ("better", "cannot tell", "worse", "same", "diverged")[place % 5], setting.label
        of = study.reference.label, word, f"{label} is said to be {word}.", "4 paired seeds"
        verdicts.append(Verdict(label, *of, found, 0.01, by_seed))
    return verdicts


def report_of(study: Study | None = None, text: str = "some text") -> Report:
    """A whole report with every section; `text` stands wherever a text of others' can."""
    study = study or study_of()
    verdicts, labels = verdicts_of_hand(study), [setting.label for setting in study.settings]
    log = Table("Experiment log", ["run", "state"], [[text, text]])
    table = Table("Settings", ["setting", "accuracy", text], [[label, "0.5\n0.4 to 0.6", text] for label in labels])
    tables = [table, Table(text, ["a", "b"], [[text, text]], frozenset({1}), text)]
    outcomes = zip(labels, ("correct", "wrong", "no format"), strict=False)
    shown = [{"setting": label, "outcome": of, "text": text, "where": "file:1"} for label, of in outcomes]
    return Report(
        text, "Which learning rate?", text, text, legend_of(study, verdicts), verdicts, [("Budget", text)], [text],
        figures_of(study), tables, log, [text], [Case(text, text, {5: shown})], [(text, text), ("a table", table)],
        forest_of(verdicts),
    )  # fmt: skip
