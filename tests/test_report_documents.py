"""Pictures, page and Markdown of a report: what a page may run, what stays text, what stands without JavaScript."""

import base64
import csv
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from report_objects import HOSTILE, report_of, series_of, study_of, verdicts_of_hand

from rlreason.errors import ConfigError
from rlreason.report.content import LIGHT, SIGNS, Figure, Series, Table, fenced, plain_colours, text
from rlreason.report.documents import (
    FILES,
    RUNTIME,
    axes_of,
    compiled,
    data_of,
    page_of,
    rows_of,
    specification,
    standalone,
    write_figures,
    write_markdown,
    write_tables,
)
from rlreason.report.figures import figures_for_paper, figures_of, forest_of, legend_of, limits_of, mean_of
from rlreason.runtime.statistics import mean_interval

X = np.arange(5.0)


class Reader(HTMLParser):
    """What a browser finds: scripts, elements with their attributes, and text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements, self.scripts, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):  # inside of script and style all is data
        {"script": self.scripts, "style": []}.get(self.cdata_elem, self.texts).append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def named(figures: list[Figure], name: str) -> Figure:
    return {figure.name: figure for figure in figures}[name]


def test_bands():
    """Bug: a run that stopped moves the mean behind its end, or values are extrapolated."""

    def mean(*curves, axis: str = "step", **options: bool) -> Series | None:
        return mean_of([Series({axis: x}, y) for x, y in curves], axis, **options)

    band = mean(*((X, np.full(5, value)) for value in (0.3, 0.5, 0.4, 0.6)))
    assert np.allclose(np.transpose([band.y, *band.band]), mean_interval([0.3, 0.5, 0.4, 0.6]))
    assert np.isnan(mean(*[(X, X / k) for k in (9, 10, 11)]).band).all()  # too few seeds
    assert mean((np.array([0.0, 1.0, 1.0]), np.array([5.0, 6.0, 7.0]))).y.tolist() == [5.0, 7.0]  # the last of a step
    share = mean(*[(X, np.full(5, end)) for end in (0.0, 1.0, 0.0, 1.0)], share=True)
    assert (share.band[0].min(), share.band[1].max()) == (0.0, 1.0)
    log = mean(*[(X, np.full(5, end)) for end in (0.01, 1.0, 0.01, 1.0)], log=True)
    assert np.allclose(log.band[0], log.y / 3)  # above zero
    assert mean((X, X), (X[:3], X[:3])).x["step"].tolist() == [0, 1, 2]  # not 4: behind step 2 there would be one seed
    fast, slow = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])
    band = mean((fast, fast * 0.1), (slow, slow * 0.1), axis="tokens")
    assert (band.x["tokens"].tolist(), np.allclose(band.y, [0.2, 0.3])) == ([2.0, 3.0], True)  # nowhere beyond
    assert mean((X, X), (X + 10, X)) is None


def test_figures():
    """Bug: a metric has no picture, or values of 0 vanish from a logarithmic axis in silence."""
    study = study_of()
    first = study.runs[0].series
    first["train/grad_norm"] = series_of(X + 1, np.array([0.0, 1, 2, -1, 3]))
    figures = figures_of(study)
    assert (figures[0].name, "3e-5 +" in forest_of(verdicts_of_hand(study)).alt) == ("eval/accuracy", True)
    last = np.mean([run.series["eval/accuracy"].y[-1] for run in study.settings[1].runs])
    assert f"3e-5 {last:.1%}" in figures[0].alt
    live = next(curve for curve in named(figures, "live_groups").curves if curve.seed == 0)
    assert np.allclose(live.y, 1 - first["reward/frac_reward_zero_std"].y)
    norms = named(figures, "train/grad_norm")
    assert ("2 values" in norms.note, norms.log) == (True, True)
    assert all((curve.y > 0).all() for curve in norms.curves)
    study.runs[0].status, study.runs[1].status = "stopped:test", "running"  # which has no cross
    assert [row["x"] for row in rows_of(figures_of(study)[0], legend_of(study, []))["stops"]] == [200.0]
    for run in study.runs:
        run.series = {"train/grad_norm": series_of(X, np.full(5, 0.3)), "eval/entropy": series_of(X, X)}
    entropy, norms = figures_of(study)
    assert (entropy.name, norms.log) == ("entropy", False)  # nothing was sampled; one value has a plain axis


def test_pictures():
    """Bug: a specification is no Vega-Lite, a label becomes markup, or a colour is left to a style sheet."""
    altair = pytest.importorskip("altair")
    study = study_of(("a b", HOSTILE, "group_size=8 learning_rate=3e-5"))
    verdicts = verdicts_of_hand(study)
    figures, legend = [*figures_of(study), forest_of(verdicts)], legend_of(study, verdicts)
    for figure in {(figure.log, bool(figure.curves)): figure for figure in figures}.values():
        altair.Chart.from_dict(specification(figure, legend), validate=True)
        titles = [axis.get("title") for axis in compiled(figure, legend)["axes"]]
        assert ({"signal": "xtitle"} in titles) == bool(figure.curves)
        svg = standalone(figure, legend)
        assert (re.search("<script|<b |\u202e", svg), r"\u202e" in svg) == (None, True)
        assert "stroke-dasharray" not in svg.partition("role-legend")[2]  # a dash around a marker gives it no shape
        assert (LIGHT["s1"] in plain_colours(svg), "var(--" in plain_colours(svg)) == (True, False)
    assert {"group_size=8", "learning_rate=3e-5"} <= set(re.findall(r">([^<]*)<", svg))  # broken at spaces
    study = study_of(("group_size=8 rate=3e-5", "runs/sweep/a=1,learning_rate=3e-5"))
    figure = replace(forest_of(verdicts_of_hand(study)), x_title=f"{'x' * 40} {'y' * 40}")
    texts = set(re.findall(r">([^<]*)<", standalone(figure, legend_of(study, []), paper=360)))
    assert {"sweep/", "a=1,", "x" * 40, "y" * 40} <= texts  # the path and the title have lines


def test_figures_for_a_paper(tmp_path):
    """Bug: a format is missing, has another width, or its CSV lacks values."""
    study = study_of()
    figures = [named(figures_of(study), "reward/mean"), forest_of(verdicts_of_hand(study))]
    write_figures(figures, legend_of(study, []), tmp_path)
    for name in ("reward_mean", "forest"):
        svg, png, pdf = ((tmp_path / f"{name}.{of}").read_bytes() for of in ("svg", "png", "pdf"))
        assert (b"var(--" in svg, png.startswith(b"\x89PNG")) == (False, True)
        assert int(re.search(rb"MediaBox \[0 0 (\d+)", pdf)[1]) == pytest.approx(234, abs=2)  # points: 3.25 inches
    rows = list(csv.DictReader((tmp_path / "reward_mean.csv").read_text().splitlines()))
    values = [float(row["value"]) for row in rows if row["data"] == "run" and row["setting"] == "1e-4"]
    assert values == [float(v) for run in study.settings[2].runs for v in run.series["reward/mean"].y]
    assert [row["low"] != "" for row in rows if row["data"] == "mean"] == [True] * 600


def test_metrics_and_axes_for_a_paper():
    """Bug: a logged key is no metric or no axis, a label is lost, or a mean is drawn along an axis that turns back."""
    study = study_of()
    for run in study.runs:
        run.series["train/kl"] = run.series["rollout/entropy"] = kl = series_of(X, X / 100)
        kl.x["lag"] = np.array([np.nan, 1.0, 2.0, 1.0, 3.0])
        run.series["lag"] = kl
        run.series["eval/accuracy"].x["lag"] = run.series["eval/accuracy"].x["step"]
    labels = {"train/kl": "KL of 50%", "lag": "lag (s)"}
    kl, accuracy = figures_for_paper(study, ["train/kl", "eval/accuracy"], "lag", labels)
    assert (kl.title, kl.x_title, kl.axis, accuracy.share) == ("KL of 50%", "lag (s)", "lag", True)
    assert [row["x"] for row in rows_of(kl, ["1e-5"])["seeds"]] == [1.0, 2.0, 1.0, 3.0] * 4
    assert (rows_of(kl, ["1e-5"])["means"], bool(rows_of(accuracy, ["1e-5"])["means"])) == ([], True)
    assert figures_for_paper(study, ["rollout/entropy"], "step", {})[0].title == "Token entropy"
    for metrics, x, says in (["eval/acuracy"], "step", "eval/accuracy"), ([], "lg", "--x lg is no key"):
        with pytest.raises(ConfigError, match=says):
            figures_for_paper(study, metrics, x, {})


def test_the_lines_scale_the_axis():
    """Bug: one spike, or a band, flattens all lines; or what lasts, or all that a flat line has, is cut off."""
    y = np.linspace(1, 2, 40)
    spike, step = y.copy(), y.copy()
    spike[20], step[:3], flat = 99.0, 9.0, np.where(X == 2, 1.0, 0.0)
    for values, ends in ((spike, (1, 2)), (step, (step.min(), 9)), (y, (1, 2)), (flat, (0, 1)), (X**3, (0, 64))):
        assert limits_of([Series({}, values)], 3.0) == pytest.approx(ends)


def test_tables_for_a_paper(tmp_path):
    """Bug: TeX reads a label as a command, or a half width is text within its CSV."""
    cells = [["a_b & 5%", "36.8%\n\N{PLUS-MINUS SIGN} 7.0", "\N{MINUS SIGN}1.5", "? cannot tell\np = 0.3", "3 s"]]
    table = Table("The settings", ["setting", "accuracy", "d", "verdict", "time a run"], cells, note="n")
    write_tables([table], tmp_path)
    assert r"a\_b \& 5\% & 36.8\% $\pm$ 7.0 & $-$1.5 & cannot tell \\" in (tmp_path / "the_settings.tex").read_text()
    [row] = csv.DictReader((tmp_path / "the_settings.csv").read_text().splitlines())
    assert [*row.values()] == ["a_b & 5%", "36.8", "-1.5", "cannot tell", "7.0"]
    write_tables([Table("Effects", ["value"], [["a b\ntogether"]])], tmp_path)
    assert "a b together" in (tmp_path / "effects.tex").read_text()  # which has another meaning in the settings


def test_page_data():
    """Bug: long runs make a page of many MB, or thinning loses their ends."""
    study = study_of(seeds=4, steps=3000)
    data = data_of([named(figures_of(study), "reward/mean")], {"reward/mean": {}}, legend_of(study, []))
    curves = [curve for curve in data["figures"]["reward/mean"]["curves"] if curve["seed"] is not None]
    for curve, run in zip(curves, study.runs, strict=True):
        values = run.series["reward/mean"].y
        assert len(curve["y"]) <= 200
        assert [curve["y"][0], curve["y"][-1]] == pytest.approx([values[0], values[-1]], rel=1e-3)
        assert (curve["x"]["step"][-1], curve["x"]["time"][-1]) == (3000, 100)  # minutes
        run.series = {"eval/accuracy": series_of(X, X / 10, tokens=0.0)}
    assert axes_of(figures_of(study)) == ["step", "time", "updates"]  # without what does not move


def test_hostile_texts():
    """Bug: a response or a label becomes a tag, a script or an invisible control character."""
    page = page_of(report_of(study_of(("plain", HOSTILE), seeds=2, steps=20, metrics=()), HOSTILE))
    page.encode("utf-8")  # no half of a character is left
    found = Reader(page)
    assert len(found.all("script")) == len(found.scripts) == 3
    text = "".join(found.texts)
    assert (text.count("<script>alert(1)</script>") >= 15, r"\u202e\x1b[2J" in text) == (True, True)
    assert not re.search("[\u202e\u2028\x1b]", page)


def test_the_page():
    """Bug: the page loads or runs what is not its own, lacks a part, or draws no data, or by another Vega."""
    report = report_of(study_of(steps=60))  # of a sweep of twelve runs
    page = page_of(report)
    found = Reader(page)
    assert len(page.encode()) <= 3_000_000
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in found.scripts[1:]]
    assert rules["script-src"].split() == [f"'sha256-{of}'" for of in hashes]  # the first script holds data
    for name, link in [of for _, attributes in found.elements for of in attributes.items()]:
        assert not name.startswith("on")
        assert name not in ("src", "href", "xlink:href", "action") or link.startswith(("#", "data:"))
    assert not re.search(r"url\(|@import", page[page.index("<style>") : page.index("</style>")])
    assert set(re.findall(r"var\(--([\w-]+)\)", page)) <= LIGHT.keys()
    plots = [attributes for attributes in found.all("div") if attributes.get("class") == "plot"]
    assert len(plots) == len(report.figures) + 1 == page.count('<div class="still" aria-hidden="true"><svg') >= 14
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in plots)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([\w-]+)\)", page)) <= set(ids)
    data = json.loads(found.scripts[0])
    assert (data["settings"], list(data["figures"])) == (report.legend, [one.name for one in report.every_figure])
    for name, figure in data["figures"].items():  # a script has rows for every picture
        wanted = {of["name"] for of in figure["spec"]["data"] if not of["name"].startswith(("source_", "data_"))}
        assert wanted <= {*figure["rows"], *(("means", "seeds", "marks", "stops") if figure["curves"] else ())}, name
    versions, code = json.loads((RUNTIME.parent / "versions.json").read_text()), RUNTIME.read_bytes()
    assert versions["packages"]["vega"] == pytest.importorskip("vl_convert").get_vega_version()  # which compiled
    assert hashlib.sha256(code).hexdigest() == versions["sha256"]
    buttons = [a for a in found.all("button") if "data-setting" in a]
    assert [(a["data-setting"], a["aria-pressed"]) for a in buttons] == [(number, "true") for number in "012"] * 2
    assert all(SIGNS[verdict.word] in page and verdict.sentence in page for verdict in report.verdicts)


def test_many_settings():
    """Bug: more settings than colours share one, or lose their verdicts."""
    report = report_of(study_of([f"s{k}" for k in range(12)], seeds=2, steps=20, metrics=()))
    assert report.legend == ["s0", *(f"s{k}" for k in range(5, 12))]  # the reference; differences grow with the place
    rows = rows_of(report.figures[0], report.legend)
    assert {row["setting"] for row in rows["means"]} == {row["setting"] for row in rows["seeds"]} == set(report.legend)
    assert standalone(report.forest, report.legend).count("var(--rest)") >= 4  # which has all settings
    page = page_of(report)
    assert (page.count('<button type="button" data-setting'), page.count("<summary>4 other settings")) == (8, 1)
    assert all(verdict.sentence in page for verdict in report.verdicts)


def test_markdown(tmp_path: Path):
    """Bug: a picture is missing, or a text ends its table, its fence or the HTML around it."""
    hostile = f"</details>{HOSTILE} | ```\n``` [x](http://evil) <img src=x>"
    report = report_of(study_of(("plain", hostile), seeds=2, steps=20), hostile)
    report.tables.append(Table("t", ["a|b", "c"], [["x\ny", "1 | 2"]], frozenset({1}), note="n"))
    write_markdown(report, tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text()
    table = "| a\\|b | c |\n| --- | --: |\n| x<br>y | 1 \\| 2 |\n\nn\n"
    assert all(part in written for part in ("? cannot tell:** ", "## Settings", "## Experiment log", table))
    pictures = re.findall(rf'src="({FILES}/[\w.]+)"', written)
    assert (len(pictures), written.count('alt="')) == (5, 5)
    for name in pictures:
        ElementTree.parse(tmp_path / name)
    outside = re.sub(r"^<img alt[^\n]*|^(`{3,})text$.*?^\1$", "", written, flags=re.M | re.S)
    assert not re.search(r"^`{3,}|<(script|img src=x)|(?<!\\)\]\(http", outside, re.M)
    assert [*fenced("``````")[:1], text("# a\nb"), text("1. no list")] == ["```````text", "\\# a b", "1\\. no list"]
