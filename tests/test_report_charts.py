"""Curves, pictures and colours of a report: bands, thinning, specifications and alternative texts."""

import csv
import json
import re

import numpy as np
import pytest
from report_objects import HOSTILE, run_of, series_of, study_of, verdicts_of_hand

from rlreason.report import content as palette
from rlreason.report.charts import compiled, rows_of, specification, standalone, write_figures
from rlreason.report.content import Figure, Series, plain_colours
from rlreason.report.documents import RUNTIME, axes_of, data_of
from rlreason.report.figures import figures_of, forest_of, legend_of, mean_of
from rlreason.runtime.statistics import mean_interval

X = np.arange(5.0)


def named(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if figure.name == name)


def mean(*curves: tuple[np.ndarray, np.ndarray], axis: str = "step", **options: bool) -> Series | None:
    return mean_of([Series({axis: x}, y) for x, y in curves], axis, **options)


def test_a_band_is_students_t_over_seeds_and_none_for_one():
    band = mean(*((X, np.full(5, value)) for value in (0.3, 0.5, 0.4)))
    for got, wanted in zip((band.y, *band.band), mean_interval([0.3, 0.5, 0.4]), strict=True):
        assert np.allclose(got, wanted)
    assert np.isnan(mean((X, X / 10)).band).all()
    assert mean((np.array([0.0, 1.0, 1.0]), np.array([5.0, 6.0, 7.0]))).y.tolist() == [5.0, 7.0]  # the last of a step
    share = mean((X, np.full(5, 0.0)), (X, np.full(5, 1.0)), share=True)
    assert (share.band[0].min(), share.band[1].max()) == (0.0, 1.0)
    log = mean((X, np.full(5, 0.01)), (X, np.full(5, 1.0)), log=True)
    assert np.allclose(log.band[0], log.y / 3)  # above zero


def test_a_band_lies_where_all_seeds_are_and_a_stopped_run_never_moves_the_mean():
    whole, stopped = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.array([0.9, 0.9, 0.9])
    band = mean((X, whole), (X[:3], stopped))
    assert band.x["step"].tolist() == [0, 1, 2]  # not 4: behind step 2 there would be one seed
    assert np.allclose(band.y, (whole[:3] + stopped) / 2)
    fast, slow = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])
    band = mean((fast, fast * 0.1), (slow, slow * 0.1), axis="tokens")
    assert (band.x["tokens"][0], band.x["tokens"][-1]) == (2.0, 3.0)
    assert np.allclose(band.y, band.x["tokens"] * 0.1)  # both lie on one line: interpolated, nowhere beyond
    assert mean((X, X), (X + 10, X)) is None


def test_every_measure_that_was_made_has_a_figure_with_its_last_values_and_no_other():
    study = study_of(seeds=1)
    figures, series = figures_of(study), study.runs[0].series
    assert figures[0].name == "eval/accuracy"
    assert f"3e-5 {study.settings[1].runs[0].series['eval/accuracy'].y[-1]:.1%}" in figures[0].alt
    assert "3e-5 +" in forest_of(verdicts_of_hand(study)).alt
    assert np.allclose(named(figures, "live_groups").curves[-3].y, 1 - series["reward/frac_reward_zero_std"].y)
    for run in study.runs:
        run.series = {"eval/entropy": series_of(X, np.full(5, 0.25))}  # nothing was sampled to learn from
    (entropy,) = figures_of(study)
    assert (entropy.name, entropy.curves[0].y[0]) == ("entropy", 0.25)


def test_what_a_logarithmic_axis_cannot_hold_is_dropped_and_counted_and_one_value_has_a_plain_axis():
    study = study_of()
    study.runs[0].series = {**study.runs[0].series, "train/grad_norm": series_of(X + 1, np.array([0.0, 1, 2, -1, 3]))}
    figure = named(figures_of(study), "train/grad_norm")
    assert ("2 values" in figure.note, figure.log) == (True, True)
    assert all((curve.y > 0).all() for curve in figure.curves)
    for run in study.runs:
        run.series = {"train/grad_norm": series_of(X, np.full(5, 0.3))}
    assert not figures_of(study)[0].log


def test_a_run_that_was_stopped_has_a_cross_and_one_under_way_has_none():
    study = study_of(("a", "b"))
    study.settings[1].runs = [run_of("b", 0, 0.5, steps=60), run_of("b", 1, 0.5)]
    study.settings[1].runs[1].status = "running"
    assert [row["x"] for row in rows_of(figures_of(study)[0], legend_of(study, []))["stops"]] == [60.0]


def test_more_than_eight_settings_leave_colours_to_the_reference_and_the_largest_differences():
    study = study_of([f"s{k}" for k in range(12)], seeds=2, steps=20)
    legend = legend_of(study, verdicts_of_hand(study))
    assert legend == ["s0", *(f"s{k}" for k in range(5, 12))]  # differences grow with the place
    rows = rows_of(figures_of(study)[0], legend)
    assert {row["setting"] for row in rows["means"]} == {row["setting"] for row in rows["seeds"]} == set(legend)
    assert standalone(forest_of(verdicts_of_hand(study)), legend).count("var(--rest)") >= 4  # which has all settings


def test_pictures_are_valid_plain_and_keep_labels_as_text():
    altair = pytest.importorskip("altair")
    study = study_of(("a b", HOSTILE, "group_size=8 learning_rate=3e-5"))
    verdicts = verdicts_of_hand(study)
    figures, legend = [*figures_of(study), forest_of(verdicts)], legend_of(study, verdicts)
    for figure in {(figure.log, bool(figure.curves)): figure for figure in figures}.values():
        altair.Chart.from_dict(specification(figure, legend), validate=True)
        titles = [axis.get("title") for axis in compiled(figure, legend)["axes"]]
        assert ({"signal": "xtitle"} in titles) == bool(figure.curves)
        svg = standalone(figure, legend)
        assert not re.search("<script|<b |\u202e", svg)
        assert "⟨U+202E⟩" in svg
        assert "stroke-dasharray" not in svg.partition("role-legend")[2]  # a dash around a marker gives it no shape
        light, dark = plain_colours(svg), plain_colours(svg, dark=True)
        assert (palette.LIGHT["s1"] in light, palette.DARK["s1"] in dark, "var(--" in light + dark) == (
            True,
            True,
            False,
        )
    assert {"group_size=8", "learning_rate=3e-5"} <= set(re.findall(r">([^<]*)<", svg))  # broken at spaces


def test_figures_for_a_paper_come_in_three_formats_with_all_their_values(tmp_path):
    study = study_of()
    figures = [named(figures_of(study), "reward/mean"), forest_of(verdicts_of_hand(study))]
    write_figures(figures, legend_of(study, []), tmp_path)
    for figure in figures:
        path = tmp_path / re.sub(r"\W+", "_", figure.name)
        svg = path.with_suffix(".svg").read_text()
        assert (figure.title in re.findall(r">([^<]*)<", svg)) == (figure.name != "forest")  # the caption is LaTeX's
        assert "var(--" not in svg
        box = re.search(rb"MediaBox \[0 0 (\d+)", path.with_suffix(".pdf").read_bytes())
        assert int(box[1]) == pytest.approx(240, abs=2)  # points: a column
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "reward_mean.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = [float(row["value"]) for row in rows if row["data"] == "run" and row["setting"] == "1e-4"]
    assert values == [float(v) for run in study.settings[2].runs for v in run.series["reward/mean"].y]
    assert [row["low"] != "" for row in rows if row["data"] == "mean"] == [True] * 600
    assert {"seed", "step", "tokens", "low", "high"} <= rows[0].keys()


def test_page_data_hold_every_run_once_thinned_and_with_few_digits():
    study = study_of(seeds=4, steps=3000)
    data = data_of([named(figures_of(study), "reward/mean")], {"reward/mean": {}}, legend_of(study, []))
    curves = [curve for curve in data["figures"]["reward/mean"]["curves"] if not curve["is_mean"]]
    for curve, run in zip(curves, study.runs, strict=True):
        values = run.series["reward/mean"].y
        assert len(curve["y"]) <= 200
        assert [curve["y"][0], curve["y"][-1]] == pytest.approx([values[0], values[-1]], rel=1e-3)
        assert (curve["x"]["step"][-1], curve["x"]["time"][-1]) == (3000, 100)  # minutes
        assert all(len(f"{value:g}".replace(".", "").lstrip("0").split("e")[0]) <= 4 for value in curve["y"])
    for run in study.runs:
        run.series = {"eval/accuracy": series_of(X, X / 10, tokens=0.0)}
    assert axes_of(figures_of(study)) == ["step", "time", "updates"]  # without what does not move


def test_a_picture_and_its_page_are_of_one_version_of_vega():
    import vl_convert

    versions = json.loads((RUNTIME.parent / "versions.json").read_text())
    assert versions["packages"]["vega"] == vl_convert.get_vega_version()


def contrast(a: str, b: str) -> float:
    """WCAG 2: (lighter + 0.05) / (darker + 0.05) of relative luminances."""
    parts = [np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for colour in (a, b)]
    linear = [np.where(of <= 0.04045, of / 12.92, ((of + 0.055) / 1.055) ** 2.4) for of in parts]
    dark, light = sorted(float(of @ [0.2126, 0.7152, 0.0722]) for of in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_page(colours: dict[str, str]):
    names = [f"s{k}" for k in range(8)]
    assert len({colours[name] for name in names}) == len(set(palette.DASHES)) == len(palette.MARKERS) == 8
    assert min(contrast(colours[name], colours["page"]) for name in [*names, "rest"]) >= 3
    texts = ("fg", "muted", "link", "good", "bad", "open")
    assert min(contrast(colours[text], colours["page"]) for text in texts) >= 4.5
    assert min(contrast(colours[tag], colours[f"{tag}-soft"]) for tag in ("good", "bad", "open")) >= 4.5
