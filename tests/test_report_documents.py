"""The documents of a report: what the page may run, what stays text, what stands without JavaScript, and Markdown."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_objects import HOSTILE, report_of, study_of

from rlreason.report import content as palette
from rlreason.report.content import SIGNS, TEMPLATES, Report, Table
from rlreason.report.documents import FILES, RUNTIME, as_json, fenced, page_of, text, write_markdown


class Reader(HTMLParser):
    """What a browser finds: scripts, elements with their attributes, and text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:  # inside of script and style all is data
        inside = self.cdata_elem
        if inside != "style":
            (self.scripts if inside == "script" else self.texts).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of()


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    """The page of a sweep of twelve runs."""
    return page_of(report)


@pytest.fixture(scope="module")
def found(page: str) -> Reader:
    return Reader(page)


def test_the_policy_allows_the_pages_scripts_by_their_hashes_and_nothing_else(page: str, found: Reader):
    assert len(page.encode()) <= 3_000_000
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in found.scripts[1:]]
    assert rules["script-src"].split() == [f"'sha256-{of}'" for of in hashes]  # the first script holds data
    for _, attributes in found.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    assert (TEMPLATES / "page.css").read_text().strip() in style
    assert set(re.findall(r"var\(--([\w-]+)\)", page)) <= palette.LIGHT.keys()


def test_what_others_wrote_stays_text_wherever_it_stands():
    page = page_of(report_of(study_of(("plain", HOSTILE), seeds=2, steps=20), HOSTILE))
    page.encode("utf-8")  # no half of a character is left
    found = Reader(page)
    assert len(found.all("script")) == len(found.scripts) == 3
    assert all("onclick" not in attributes for attributes in found.all("b"))
    text = "".join(found.texts)
    assert text.count("<script>alert(1)</script>") >= 15
    assert "⟨U+202E⟩⟨U+001B⟩[2J" in text
    assert not re.search("[\u202e\u2028\x1b]", page)
    data = {"a": "</script><!-- & \u2028"}
    assert not re.search("[<>&\u2028]", as_json(data))
    assert json.loads(as_json(data)) == data


def test_every_picture_stands_without_javascript_and_a_script_has_rows_for_it(page: str, found: Reader, report: Report):
    plots = [attributes for attributes in found.all("div") if attributes.get("class") == "plot"]
    assert len(plots) == len(report.figures) + 1 >= 14
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in plots)
    assert page.count('<div class="still" aria-hidden="true"><svg') == len(plots)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([\w-]+)\)", page)) <= set(ids)
    data = json.loads(found.scripts[0])
    assert list(data["figures"]) == [figure.name for figure in report.every_figure]
    for name, figure in data["figures"].items():
        named = {of["name"] for of in figure["spec"]["data"] if not of["name"].startswith(("source_", "data_"))}
        assert named <= {*figure["rows"], *(("means", "seeds", "marks", "stops") if figure["curves"] else ())}, name
    assert data["settings"] == report.legend


def test_buttons_verdicts_and_tables_are_there(page: str, found: Reader, report: Report):
    buttons = [a for a in found.all("button") if "data-setting" in a]
    assert [a["data-setting"] for a in buttons] == ["0", "1", "2"] * 2
    assert all(a["aria-pressed"] == "true" and a["type"] == "button" for a in buttons)
    assert 'value="tokens"' in page
    assert all(SIGNS[verdict.word] in page and verdict.sentence in page for verdict in report.verdicts)
    for tag, role in (("table", "table"), ("tr", "row"), ("td", "cell"), ("thead", "rowgroup"), ("tbody", "rowgroup")):
        assert {attributes.get("role") for attributes in found.all(tag)} == {role}  # on phones they are no tables else
    assert all(attributes.get("data-label") is not None for attributes in found.all("td"))


def test_many_settings_fold_the_verdicts_of_those_without_a_curve_and_nothing_is_a_page_too():
    study = study_of([f"s{k}" for k in range(12)], seeds=2, steps=20)
    for run in study.runs:
        run.series = {"eval/accuracy": run.series["eval/accuracy"]}
    report = report_of(study)
    page = page_of(report)
    assert len([a for a in Reader(page).all("button") if "data-setting" in a]) == 8
    assert "<summary>4 other settings</summary>" in page
    assert all(verdict.sentence in page for verdict in report.verdicts)
    report.figures, report.tables, report.cases, report.details, report.problems = [], [], [], [], []
    report.verdicts, report.forest, report.facts, report.warnings = [], None, [], []
    assert report.question in page_of(report)


def test_the_runtime_is_what_its_hash_and_licences_say():
    versions = json.loads((RUNTIME.parent / "versions.json").read_text())
    code = RUNTIME.read_bytes()
    assert hashlib.sha256(code).hexdigest() == versions["sha256"]
    assert not re.search(rb"</script|<!--", code, re.IGNORECASE)
    licences = (RUNTIME.parent / "LICENSES.txt").read_text()
    assert all(f"{name} {version} (" in licences for name, version in versions["packages"].items())
    assert set(re.findall(r"\d \(([\w-]+)\)\n", licences)) == {"BSD-3-Clause", "ISC"}


def test_markdown_has_the_same_with_pictures_that_exist_and_texts_that_stay_texts(tmp_path: Path):
    hostile = f"</details>{HOSTILE} | ```\n``` [x](http://evil) <img src=x>"
    report = report_of(study_of(("plain", hostile), seeds=2, steps=20), hostile)
    report.tables.append(Table("t", ["a|b", "c"], [["x\ny", "1 | 2"]], frozenset({1}), note="n"))
    write_markdown(report, tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text()
    assert f"{SIGNS['cannot tell']} cannot tell:** " in written
    for part in ("## Settings", "## Experiment log", "| a\\|b | c |\n| --- | --: |\n| x<br>y | 1 \\| 2 |\n\nn\n"):
        assert part in written
    pictures = re.findall(rf'(?:src|srcset)="({FILES}/[\w.]+)"', written)
    assert len(pictures) == 10
    assert all('alt="' in line for line in written.splitlines() if line.startswith("<picture"))
    for name in pictures:
        ElementTree.parse(tmp_path / name)
    assert not list(tmp_path.rglob("*.partial"))
    fence, outside = "", []
    for line in written.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif found := re.match(r"(`{3,})text$", line):
            fence = found[1]
        elif not line.startswith("<picture"):  # whose alt text is an attribute
            outside.append(line)
    assert not fence
    assert "\u202e" not in written
    assert not re.search(r"<(script|img src=x)", "\n".join(outside))
    assert not re.search(r"(?<!\\)\]\(http", "\n".join(outside))
    assert fenced("``````") == ["```````text", "``````", "```````"]
    assert text("# no heading\nat all") == "\\# no heading at all"
    assert text("1. no list") == "1\\. no list"
