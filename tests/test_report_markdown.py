"""A report as Markdown: everything is there, and texts of others stay texts."""

import re
from xml.etree import ElementTree

import pytest

from rlreason.report.content import Case, Detail, ShownResponse, Table
from rlreason.report.documents import FILES, fenced, filled, text, write_markdown
from rlreason.report.read import read_study
from rlreason.report.sections import build_report
from tests.sweep_folders import answers, sweep

pytest.importorskip("vl_convert")
HOSTILE = "</details><script>alert(1)</script> | ```\n``` \u202e [x](http://evil) <img src=x>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    sweep(
        folder, "lr", ["1", "2"], lambda value, seed: answers(seed, 0.5 + 0.3 * (value == "2")), reference={"lr": "1"}
    )
    return build_report(read_study([folder]))


def test_the_document_has_verdict_tables_and_pictures_that_exist(report, tmp_path):
    write_markdown(report, tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text()
    assert "- **\N{BLACK UP-POINTING TRIANGLE} better:** 2 is better than 1 by" in written
    for title in ("## Settings", "## Experiment log", "## Details"):
        assert title in written
    pictures = re.findall(rf'(?:src|srcset)="({FILES}/[\w.]+)"', written)
    assert pictures
    assert all('alt="' in line for line in written.splitlines() if "<img" in line)
    for name in pictures:
        ElementTree.parse(tmp_path / name)
    assert not list(tmp_path.rglob("*.partial"))


def test_texts_of_others_are_text(report, tmp_path):
    report.cases = [Case(HOSTILE, HOSTILE, {0: [ShownResponse("1", "wrong", HOSTILE, "evals/a:1")]})]
    report.details = [Detail(HOSTILE, text=HOSTILE), Detail("t", table=Table("t", ["a", "b"], [[HOSTILE, "x"]]))]
    report.warnings = [HOSTILE]
    write_markdown(report, tmp_path / "report.md")
    lines = (tmp_path / "report.md").read_text().splitlines()
    fence, outside = "", []
    for line in lines:
        if fence:
            fence = "" if line == fence else fence
        elif found := re.match(r"(`{3,})text$", line):
            fence = found[1]
        else:
            outside.append(line)
    assert not fence
    assert "\u202e" not in "\n".join(lines)
    assert not re.search(r"<(script|img src=x)", "\n".join(outside))
    assert not re.search(r"(?<!\\)\]\(http", "\n".join(outside))


def test_cells_and_fences_do_not_break_out(report):
    report.tables = [Table("t", ["a|b", "c"], [["x\ny", "1 | 2"]], frozenset({1}), note="n")]
    lines = "| a\\|b | c |\n| --- | --: |\n| x<br>y | 1 \\| 2 |\n\nn\n"
    assert lines in filled("report.md.j2", report=report, pictures=[], dark=False)
    assert fenced("``````") == ["```````text", "``````", "```````"]
    assert text("# no heading\nat all") == "\\# no heading at all"
    assert text("1. no list") == "1\\. no list"
