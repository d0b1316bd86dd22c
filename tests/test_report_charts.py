"""Curves, pictures and colours of a report: bands, thinning, palettes, specifications and alternative texts."""

import csv
import itertools
import json
import math
import re

import numpy as np
import pytest
from report_objects import HOSTILE, run_of, series_of, study_of, verdicts_of_hand

from rlreason.report import content as palette
from rlreason.report.charts import compiled, rows_of, specification, standalone, write_figures
from rlreason.report.content import Entry, Figure, plain_colours, thinned
from rlreason.report.documents import RUNTIME, axes_of, data_of
from rlreason.report.figures import band_of, figures_of, forest_of, legend_of
from rlreason.report.study import Study
from rlreason.runtime.intervals import mean_interval

X = np.arange(5.0)


def figure_named(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if figure.name == name)


# ---- bands ----


def test_a_band_is_students_t_over_seeds() -> None:
    ys = [np.full(5, value) for value in (0.3, 0.5, 0.4)]
    band = band_of([X] * 3, ys)
    assert band is not None
    mean, low, high = mean_interval([0.3, 0.5, 0.4])
    assert np.allclose(band.mean, mean)
    assert np.allclose(band.low, low)
    assert np.allclose(band.high, high)


def test_one_seed_has_a_mean_and_no_band() -> None:
    band = band_of([X], [X / 10])
    assert band is not None
    assert np.isnan(band.low).all()
    assert np.array_equal(band.mean, X / 10)


def test_a_stopped_run_ends_the_band_and_never_moves_the_mean() -> None:
    whole, stopped = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.array([0.9, 0.9, 0.9])
    band = band_of([X, X[:3]], [whole, stopped])
    assert band is not None
    assert band.x.tolist() == [0, 1, 2]  # not 4: behind step 2 there would be one seed
    assert np.allclose(band.mean, (whole[:3] + stopped) / 2)


def test_a_band_against_time_lies_in_the_range_that_all_seeds_share() -> None:
    fast, slow = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])
    band = band_of([fast, slow], [fast * 0.1, slow * 0.1], points=11)
    assert band is not None
    assert band.x[0] == 2.0
    assert band.x[-1] == 3.0
    assert np.allclose(band.mean, band.x * 0.1)  # both lie on one line: interpolated, nowhere beyond


def test_seeds_without_a_common_range_have_no_band() -> None:
    assert band_of([X, X + 10], [X, X]) is None


def test_shares_are_clipped_and_a_logarithmic_band_keeps_above_zero() -> None:
    ys = [np.full(5, 0.0), np.full(5, 1.0)]
    share = band_of([X] * 2, ys, share=True)
    assert share is not None
    assert share.low is not None
    assert share.high is not None
    assert share.low.min() == 0.0
    assert share.high.max() == 1.0
    log = band_of([X] * 2, [np.full(5, 0.01), np.full(5, 1.0)], log=True)
    assert log is not None
    assert log.low is not None
    assert (log.low > 0).all()


# ---- thinning ----


def test_thinning_keeps_ends_and_extremes() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=10_000)
    y[1234], y[8765] = 50.0, -50.0
    kept = thinned(y, 200)
    assert len(kept) <= 200
    assert {0, 1234, 8765, 9999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


# ---- figures of a study ----


def test_every_measure_that_was_made_has_a_figure_and_no_other() -> None:
    names = [figure.name for figure in figures_of(study_of())]
    assert names[0] == "eval/accuracy"
    assert {"live_groups", "wrong_with_format", "no_format", "entropy", "mismatch", "length_wrong"} <= set(names)
    bare = study_of()
    for run in bare.runs:
        run.series = {"eval/accuracy": run.series["eval/accuracy"]}
    assert [figure.name for figure in figures_of(bare)] == ["eval/accuracy"]


def test_categories_and_live_groups_are_made_of_what_was_logged() -> None:
    study = study_of(seeds=1)
    run = study.runs[0]
    figures = figures_of(study)
    live = figure_named(figures, "live_groups").curves
    wrong = figure_named(figures, "wrong_with_format").curves
    assert live is not None
    assert wrong is not None
    assert np.allclose(live.lines[0].y, 1 - run.series["reward/frac_reward_zero_std"].y)
    assert np.allclose(wrong.lines[0].y, run.series["eval/format"].y - run.series["eval/accuracy"].y)


def test_values_that_a_logarithmic_axis_cannot_hold_are_dropped_and_counted() -> None:
    study = study_of()
    study.runs[0].series = {**study.runs[0].series, "train/grad_norm": series_of(X + 1, np.array([0.0, 1, 2, -1, 3]))}
    figure = figure_named(figures_of(study), "train/grad_norm")
    assert "2 values" in figure.note
    assert figure.curves is not None
    assert all((line.y > 0).all() for line in figure.curves.lines)


def test_entropy_is_that_of_evaluations_where_nothing_was_sampled_to_learn_from() -> None:
    study = study_of()
    for run in study.runs:
        run.series = {"eval/entropy": series_of(X, np.full(5, 0.25))}
    assert figure_named(figures_of(study), "entropy").curves.lines[0].y[0] == 0.25


def test_a_run_that_was_stopped_has_a_cross_and_one_under_way_has_none() -> None:
    study = study_of(("a", "b"))
    study.settings[1].runs = [run_of("b", 0, 0.5, steps=60), run_of("b", 1, 0.5)]
    study.settings[1].runs[1].status = "running"
    legend = legend_of(study, [])
    figure = figures_of(study)[0]
    assert "stopped early" in figure.subtitle
    stops = rows_of(figure, legend)["stops"]
    assert [row["x"] for row in stops] == [60.0]


def test_alternative_texts_say_what_is_there_and_end_with_the_last_values() -> None:
    study = study_of()
    figures = figures_of(study)
    for figure in figures:
        assert figure.title.split()[0] in figure.alt
        assert figure.alt.endswith(".")
    last = np.mean([run.series["eval/accuracy"].y[-1] for run in study.settings[1].runs])
    assert f"3e-5 {last:.1%}" in figures[0].alt
    assert "3 settings, mean of 4 seeds with a 95% band" in figures[0].alt
    forest = forest_of(verdicts_of_hand(study))
    assert forest is not None
    assert "3e-5 +" in forest.alt


def test_best_of_n_curves_come_with_their_intervals() -> None:
    study = study_of(("a",), seeds=1)
    points = [[0.2, 0.15, 0.25], [0.5, 0.4, 0.6]]
    study.runs[0].summary = {"n_list": [1, 4], "best_of_n": {"pass@N": points, "maj@N": points}}
    figure = figure_named(figures_of(study), "best_of_n/pass_N")
    rows = rows_of(figure, legend_of(study, []))["means"]
    assert [(row["x"], row["y"], row["low"], row["high"]) for row in rows] == [(1, *points[0]), (4, *points[1])]


def test_more_than_eight_settings_leave_colours_to_the_reference_and_the_largest_differences() -> None:
    study = study_of([f"s{k}" for k in range(12)], seeds=2, steps=20)
    legend = legend_of(study, verdicts_of_hand(study))
    coloured = [entry for entry in legend if entry.colour is not None]
    assert legend[0] == Entry("s0", 0, True)
    assert [entry.colour for entry in coloured] == list(range(6))  # no colour twice
    assert [entry.label for entry in coloured[1:]] == [
        "s7",
        "s8",
        "s9",
        "s10",
        "s11",
    ]  # differences grow with the place
    rows = rows_of(figures_of(study)[0], legend)
    assert {row["setting"] for row in rows["means"]} == {entry.label for entry in coloured}
    assert {row["setting"] for row in rows["seeds"]} == {entry.label for entry in legend}
    assert [entry.colour for entry in legend_of(study_of(), [])] == [0, 1, 2]


# ---- drawing ----


@pytest.fixture(scope="module")
def drawn() -> tuple[Study, list[Figure], list[Entry]]:
    study = study_of()
    verdicts = verdicts_of_hand(study)
    study.runs[0].summary = {"n_list": [1, 4], "best_of_n": {"pass@N": [[0.2, 0.1, 0.3], [0.5, 0.4, 0.6]]}}
    forest = forest_of(verdicts)
    assert forest is not None
    return study, [*figures_of(study), forest], legend_of(study, verdicts)


def test_every_specification_is_valid_vega_lite(drawn: tuple[Study, list[Figure], list[Entry]]) -> None:
    altair = pytest.importorskip("altair")
    kinds = {(figure.kind, figure.log_range is None, figure.curves is None): figure for figure in drawn[1]}
    for figure in kinds.values():
        altair.Chart.from_dict(specification(figure, drawn[2]), validate=True)


def test_static_pictures_have_title_legend_and_plain_colours(drawn: tuple[Study, list[Figure], list[Entry]]) -> None:
    _, figures, legend = drawn
    svg = standalone(figures[0], legend)
    light, dark = plain_colours(svg), plain_colours(svg, dark=True)
    for text in ("Validation accuracy", "3e-5", palette.LIGHT["s1"], palette.LIGHT["page"]):
        assert text in light
    assert palette.DARK["s1"] in dark
    assert palette.DARK["page"] in dark
    assert "var(--" not in light + dark
    assert not re.search(r'd="[^"]*\d\.\d\d', light)


def test_the_markers_of_a_legend_are_whole(drawn: tuple[Study, list[Figure], list[Entry]]) -> None:
    """The dash of a setting's line was drawn around its marker, which then had the shape of no marker."""
    _, figures, legend = drawn
    beside = standalone(figures[0], legend).partition("role-legend")[2]
    assert legend[1].label in beside
    assert "stroke-dasharray" not in beside


def test_what_is_read_in_a_picture_keeps_all_digits() -> None:
    study = study_of(("lr 0.01", "lr 0.0003"))
    verdicts = verdicts_of_hand(study)
    svg = standalone(figures_of(study)[0], legend_of(study, verdicts))
    assert ">lr 0.01<" in svg
    assert ">lr 0.0003<" in svg


def test_a_picture_and_its_page_are_of_one_version_of_vega() -> None:
    import vl_convert

    versions = json.loads((RUNTIME.parent / "versions.json").read_text())
    assert versions["packages"]["vega"] == vl_convert.get_vega_version()


def test_the_x_title_of_a_curve_can_be_switched_and_others_not(drawn: tuple[Study, list[Figure], list[Entry]]) -> None:
    _, figures, legend = drawn
    titles = {figure.name: [axis.get("title") for axis in compiled(figure, legend)["axes"]] for figure in figures}
    assert {"signal": "xtitle"} in titles["eval/accuracy"]
    assert "N, responses to choose from" in titles["best_of_n/pass_N"]
    assert {"signal": "xtitle"} not in titles["forest"] + titles["best_of_n/pass_N"]


def test_labels_that_would_be_markup_stay_text_in_pictures() -> None:
    study = study_of(("plain", HOSTILE))
    verdicts = verdicts_of_hand(study)
    forest = forest_of(verdicts)
    assert forest is not None
    for figure in [figures_of(study)[0], forest]:
        svg = standalone(figure, legend_of(study, verdicts))
        assert "<script" not in svg
        assert "<b " not in svg
        assert "\u202e" not in svg
        assert "⟨U+202E⟩" in svg


def test_figures_for_a_paper_come_in_three_formats_with_all_their_values(drawn, tmp_path) -> None:
    study, all_figures, legend = drawn
    figures = [figure_named(all_figures, name) for name in ("reward/mean", "forest")]
    write_figures(figures, legend, tmp_path)
    for figure in figures:
        stem = re.sub(r"\W+", "_", figure.name)
        svg = (tmp_path / f"{stem}.svg").read_text()
        assert (figure.title in re.findall(r">([^<]*)<", svg)) == (figure.kind == "curves")  # the caption is LaTeX's
        assert "var(--" not in svg
        box = re.search(rb"MediaBox \[0 0 (\d+)", (tmp_path / f"{stem}.pdf").read_bytes())
        assert int(box[1]) == pytest.approx(240, abs=2)  # points: a column
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "reward_mean.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = [float(row["value"]) for row in rows if row["data"] == "run" and row["setting"] == "1e-5"]
    assert values == [float(v) for run in study.settings[0].runs for v in run.series["reward/mean"].y]
    assert {"seed", "step", "tokens", "low", "high"} <= rows[0].keys()


# ---- data of a page ----


def test_page_data_hold_every_run_once_thinned_and_with_few_digits() -> None:
    study = study_of(seeds=4, steps=3000)
    figures = figures_of(study)
    data = data_of(figures, {figure.name: {} for figure in figures}, legend_of(study, []))
    columns = {axis: sets["seeds"] for axis, sets in data["figures"]["reward/mean"]["along"].items()}
    assert len({of["y"] for of in columns.values()}) == 1  # axes share their values
    runs, x, y = (np.array(data["columns"][columns["step"][name]]) for name in ("run", "x", "y"))
    for number, run in enumerate(study.runs):
        values, own = run.series["reward/mean"].y, y[runs == number]
        assert len(own) <= 200
        assert max(own) == pytest.approx(values.max(), rel=1e-3)
        assert min(own) == pytest.approx(values.min(), rel=1e-3)
        assert x[runs == number][-1] == 3000
    assert all(len(f"{value:g}".replace(".", "").lstrip("0").split("e")[0]) <= 4 for value in y)
    whole = figures_of(study_of(seeds=4, steps=100))
    assert len(data_of(whole, {figure.name: {} for figure in whole}, legend_of(study, []))["columns"]) < 16 * len(whole)


def test_axes_that_do_not_move_are_not_offered_and_times_have_a_unit_that_fits() -> None:
    study = study_of()
    for run in study.runs:
        run.series = {"eval/accuracy": series_of(X, X / 10, tokens=0.0, seconds=1000.0)}
    axes = axes_of(figures_of(study))
    assert list(axes) == ["step", "time", "updates"]
    assert axes["time"] == {"title": "active time (minutes)", "divide": 60}


# ---- palette ----


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2: (lighter + 0.05) / (darker + 0.05) of relative luminances."""
    light, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


#: Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as such eyes see it.
EYES = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson (2020)."""
    lms = np.cbrt(
        np.array(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ]
        )
        @ np.clip(rgb, 0, 1)
    )
    return (
        np.array(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ]
        )
        @ lms
    )


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_page_and_from_each_other_for_all_eyes(colours: dict[str, str]) -> None:
    names = [f"s{k}" for k in range(8)]
    for name in [*names, "rest"]:
        assert contrast(colours[name], colours["page"]) >= 3, name
    for text in ("fg", "muted", "link", "good", "bad", "open"):
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    for tag in ("good", "bad", "open"):
        assert contrast(colours[tag], colours[f"{tag}-soft"]) >= 4.5, tag
    for eyes, matrix in EYES.items():
        seen = {name: oklab(np.array(matrix) @ linear(colours[name])) for name in names}
        for a, b in itertools.combinations(names, 2):
            assert 100 * math.dist(seen[a], seen[b]) >= 9, (eyes, a, b)


def test_light_and_dark_name_the_same_colours_and_each_setting_has_dash_and_marker() -> None:
    assert palette.LIGHT.keys() == palette.DARK.keys()
    assert len(set(palette.DASHES)) == len(palette.MARKERS) == 8
