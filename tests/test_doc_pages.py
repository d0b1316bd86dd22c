"""The documentation: the settings page is what the code says now, the index names every page, every link leads on."""

import re
from pathlib import Path

import pytest

from tools.settings_page import page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = (DOCS / "settings.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])


def test_the_settings_page_is_what_the_code_says_now():
    assert page() == SETTINGS, "docs/settings.md is not what the code says now: type `make docs`"


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead, but those into the net."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page in a link: `#what-a-run-leaves`."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = [title.lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(source):
    for link in links(source.read_text("utf-8")):
        name, _, heading = link.partition("#")
        target = (source.parent / name).resolve() if name else source
        assert target.exists(), f"{source.name} links to {link}, which is not there"
        assert not heading or heading in anchors(target), f"{source.name} links to {link}, which has no such heading"


def test_the_index_names_every_page_of_the_documentation():
    pages = {path.name for path in DOCS.iterdir() if path.suffix in (".md", ".ipynb")} - {"README.md"}
    assert pages <= set(links((DOCS / "README.md").read_text("utf-8")))
