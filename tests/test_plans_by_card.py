"""The table of docs/scale.md that says which model fits which card is what the plan says today."""

import sys

from tests.starts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from plans_by_card import BEGIN, CARDS, END, EXPERIMENTS, put_between, table


def test_the_page_holds_todays_table():
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert put_between(page, table()) == page, "python benchmarks/plans_by_card.py docs/scale.md writes it again"


def test_every_run_has_a_row_for_every_card_and_whoever_does_not_fit_a_cure():
    rows = [line.strip("|").split("|") for line in table()[2:]]
    assert len(rows) == len(EXPERIMENTS) * len(CARDS)
    assert sum(f"{80} GB" in row[1] and "fits" in row[2] for row in rows) == len(EXPERIMENTS)
    for row in rows:
        assert ("fits" in row[2]) == (row[3].strip() == "-")
        assert "none" not in row[3]
