"""Forecasts from curves that are known: what intervals hold, what cannot be told, and the command."""

import json

import numpy as np
import pytest
from report_objects import series_of, study_of

from rlreason.report.forecast import METRIC, Forecast, fell, forecast_text, forecasts_of
from rlreason.report.study import Study
from tests.test_report_command import report, whole  # noqa: F401

STEPS = np.linspace(0.0, 100.0, 11)


def curves(*shapes: tuple[float, float], seeds: int = 4, problems: int = 1319) -> Study:
    """Settings with a ceiling and a step of half of the rise from 0.2, and the noise of binary answers."""
    rng, study = np.random.default_rng(0), study_of([f"s{k}" for k in range(len(shapes))], seeds)
    for setting, (ceiling, middle) in zip(study.settings, shapes, strict=True):
        for run in setting.runs:
            chance = 0.2 + (ceiling - 0.2) * STEPS**1.5 / (STEPS**1.5 + middle**1.5)
            run.series = {METRIC: series_of(STEPS, rng.binomial(problems, chance) / problems)}
    return study


@pytest.mark.parametrize(("seeds", "problems"), [(1, 1319), (2, 1319), (4, 256), (8, 1319)])
def test_intervals_hold_the_truth_and_a_straight_line_has_no_ceiling(seeds, problems):
    """Bug: the ceiling of a curve that still rises is told, or intervals miss what is there."""
    bent, straight = forecasts_of(curves((0.7, 10.0), (0.9, 300.0), seeds=seeds, problems=problems), 200.0)
    truth = 0.2 + 0.5 * 200**1.5 / (200**1.5 + 10**1.5)
    assert bent.value[1] < truth < bent.value[2] < bent.value[1] + 0.3
    assert (bent.ceiling[1] < 0.7 < bent.ceiling[2], straight.told) == (True, False)


def test_higher_and_faster():
    """Bug: a setting that is only faster gets a higher ceiling, or a higher one is not told."""
    found = forecasts_of(curves((0.6, 12.0), (0.8, 12.0), (0.6, 5.0), (0.4, 12.0), seeds=8, problems=5000), 200.0)
    assert [one.against for one in found[1:]] == ["higher ceiling", "only faster", "lower ceiling"]
    again = forecasts_of(curves((0.6, 12.0), (0.6, 12.0), seeds=8, problems=5000), 200.0)
    assert again[1].against == "cannot be told apart"


def test_no_curve_is_fitted_to_what_rose_and_fell():
    """Bug: a collapse gets a ceiling, or accuracies of 0 in all evaluations one of exactly 0."""
    study = curves((0.6, 12.0), (0.6, 12.0), (0.6, 12.0))
    fallen, zero = (setting.runs for setting in study.settings[1:])
    for run in (*fallen, *zero):
        y = run.series[METRIC].y * np.interp(STEPS, [0, 40, 100], [1, 1, 0.7]) if run in fallen else 0 * STEPS
        run.series = {METRIC: series_of(STEPS, y), "eval/problems": series_of(STEPS, 0 * STEPS + 256)}
    rising, falling, none = forecasts_of(study, 200.0)
    assert (rising.fell, falling.fell, falling.told, falling.against) == (False, True, False, "cannot be told apart")
    assert (none.value[:2], none.value[2] > 1 / 1024) == ((0.0, 0.0), True)
    assert forecast_text([falling])[1].endswith("cannot be told: rose and fell; cannot be told apart")


def test_a_steep_rise_hides_no_fall_and_noise_is_none():
    """Bug: the noise is read off the rise, so that a run which lost a third is forecast to stay."""
    assert fell(np.array([[0.286, 0.695, 0.674, 0.569, 0.525]] * 3), 1 / 256)
    rng, flat = np.random.default_rng(0), np.array([0.3, *[0.6] * 8])
    assert np.mean([fell(rng.binomial(256, flat, (3, 9)) / 256, 1 / 256) for _ in range(500)]) < 0.05


def test_command(report, whole, tmp_path):  # noqa: F811
    """Bug: a step within the curve, or a curve of three points, is forecast; the table or the figures are missing."""
    code, _, error = report(whole, "--forecast", "60")
    assert (code, "needs 5" in error) == (2, True)
    folder = tmp_path / "lr=1,seed=0"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\n")
    rows = [{"rollout_step": s, "eval/accuracy": 0.7 * s / (s + 9)} for s in range(20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "not after step 19" in report(folder, "--forecast", "19")[2]
    assert "--forecast nan is not after" in report(folder, "--forecast", "nan")[2]
    assert "at step 60" in report(folder, "--forecast", "60")[1]
    (one,) = json.loads(report(folder, "--forecast", "60", "--json")[1])["forecast"]
    assert {"ceiling_told", *Forecast.__dataclass_fields__} == one.keys()
    assert (one["value"][0], one["ceiling_told"]) == (pytest.approx(0.7 * 60 / 69, abs=0.03), True)
