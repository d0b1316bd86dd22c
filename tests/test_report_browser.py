"""A report's page in a real browser: nothing is asked of any network, everything reacts, everybody can reach it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from report_objects import report_of

from rlreason.report.content import Case
from rlreason.report.documents import page_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("vl_convert")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: .ci/browser installs it"),
    pytest.mark.long,
]
AXE = Path(__file__).resolve().parents[1] / ".venv/browser/axe.min.js"
HOSTILE = "</pre></script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)> \u202e "
PLOT = ".plot[data-figure='eval/accuracy']"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """The report of three rates, four seeds each, with curves and hostile responses."""
    report = report_of()
    hostile = {"outcome": "wrong", "text": HOSTILE + "x" * 5000, "where": "a:1"}
    shown = [{"setting": label, **hostile} for label in report.legend]
    report.cases = [Case("What is 3 + 4?", "7", dict.fromkeys((0, 20, 40), shown))]
    (target := tmp_path_factory.mktemp("browser") / "report.html").write_text(page_of(report), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as run:
        found = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(browser, file: Path, width: int = 1280, **options) -> Iterator:
    """The page with every picture drawn, which must have asked for nothing and said nothing in the end."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page, odd = context.new_page(), []
    page.on("console", lambda message: odd.append(f"{message.type}: {message.text[:200]}"))
    page.on("pageerror", lambda error: odd.append(f"error: {str(error)[:200]}"))
    page.on("dialog", lambda dialog: (odd.append("dialog"), dialog.dismiss()))
    page.on("request", lambda r: r.url.startswith(("data:", "blob:")) or r.url == file.as_uri() or odd.append(r.url))
    context.route("**/*", lambda route: route.continue_() if route.request.url == file.as_uri() else route.abort())
    policy = "addEventListener('securitypolicyviolation', e => console.error('csp ' + e.violatedDirective))"
    page.add_init_script(policy)
    page.goto(file.as_uri())
    page.wait_for_selector(".plot[data-ready]")
    for plot in page.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        page.wait_for_function("e => e.dataset.ready", arg=plot)
    page.evaluate("scrollTo(0, 0)")
    yield page
    assert odd == []
    context.close()


def test_it_reacts(browser, page_file):
    """Bug: the policy or an error stops the script, or a button does nothing."""
    with opened(browser, page_file) as page:
        assert page.locator(".plot .live svg").count() >= 6
        assert page.locator("script").count() == page.evaluate("document.scripts.length") <= 4
        assert "<script>alert(1)</script>" in page.locator(".cell pre").first.inner_text()
        first, button = page.locator(".plot[data-curve]").first, page.locator(".legend button[data-setting='1']").first
        lines = [f"{PLOT} .live path[stroke='var(--s{k})'][stroke-width='2.3']" for k in (0, 1)]  # of the means
        for press, counts in ((button.click, [1, 0]), (lambda: button.press("Enter"), [1, 1])):
            assert page.locator(lines[1]).count() == 2 - sum(counts)
            press()
            page.wait_for_timeout(600)
            assert [page.locator(line).count() for line in lines] == counts
        page.locator("input.axis[value=tokens]").first.check()
        page.wait_for_function("() => document.querySelector('.plot[data-curve]').textContent.includes('tokens')")
        first.focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("() => document.querySelector('.readout').innerText.includes('1e-4')")
        box = first.bounding_box()
        page.mouse.move(box["x"] + 150, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 350, box["y"] + 90, steps=4)
        page.mouse.up()
        page.wait_for_selector(".reset:not([hidden])")
        page.locator(".reset").first.click()
        page.wait_for_selector(".reset", state="hidden")
        for kind, begins in (("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b"data,seed,setting")):
            with page.expect_download() as download:
                page.locator(f"[data-take={kind}]").first.click()
            assert Path(download.value.path()).read_bytes().startswith(begins)
        button.click()
        with page.expect_download() as download:
            page.locator("[data-take=csv]").first.click()
        assert ",3e-5," not in Path(download.value.path()).read_text()  # which is hidden
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")
        page.emulate_media(media="print")
        assert len(page.pdf(format="A4")) > 50_000


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: .ci/browser installs it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessibility(width, scheme, browser, page_file):
    """Bug: a wide table or picture moves the page of a phone, or axe finds a violation."""
    with opened(browser, page_file, width, color_scheme=scheme) as page:
        session = page.context.new_cdp_session(page)
        session.send("Page.setBypassCSP", {"enabled": True})
        session.send("Runtime.evaluate", {"expression": AXE.read_text("utf-8") + ";0"})
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
        assert [f"{v['id']} x{len(v['nodes'])}: {v['nodes'][0]['html'][:120]}" for v in found] == []
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
