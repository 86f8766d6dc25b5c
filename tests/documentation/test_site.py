"""The site is built strictly, and read in a real browser: from a folder, with nothing but its files."""

import re
from pathlib import Path

import pytest

import penstock as ps
from penstock import runtime

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def pages_of(site):
    """All pages but the one for wrong addresses, which needs a server."""
    return sorted(set(site.rglob("*.html")) - {site / "404.html"})


def test_every_public_name_is_in_the_api_pages(site):
    described = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    names = {f"penstock.{name}" for name in ps.__all__} | {f"penstock.runtime.{name}" for name in runtime.__all__}
    anchors = set(re.findall(r'<h[2-4] id="(penstock\.[^"]+)"', described))
    last = {anchor.rpartition(".")[2] for anchor in anchors}
    assert {name for name in names if name.rpartition(".")[2] not in last} == {"penstock.__version__"}


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text()
    pages = {path.relative_to(site).as_posix() for path in pages_of(site)} - {"index.html"}
    assert {page for page in pages if f'href="{page}"' not in home} == set()


@pytest.fixture
def visit(browser, site):
    """Open pages of the site; afterwards, no request has gone elsewhere and nothing was complained about."""
    opened, said, asked = [], [], []

    def visiting(page_name, *, prefers="light"):
        context = browser.new_context(color_scheme=prefers, viewport={"width": 1280, "height": 900})
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / page_name).as_uri())
        return page

    yield visiting
    for context in opened:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:", "blob:"))] == []


def test_every_page_is_legible_and_fits_a_phone(visit, site):
    page = visit("index.html")
    faint, wide = {}, []
    for path in pages_of(site):
        page.goto(path.as_uri())
        page.add_style_tag(content="* { transition: none !important; }")
        for scheme in ("default", "slate"):
            page.evaluate("(scheme) => document.body.setAttribute('data-md-color-scheme', scheme)", scheme)
            if found := page.evaluate(CONTRAST, 4.5):
                faint[path.name, scheme] = found
        page.set_viewport_size({"width": 390, "height": 800})
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(path.name)
        page.set_viewport_size({"width": 1280, "height": 900})
    assert faint == {}
    assert wide == []


@pytest.mark.parametrize(("preference", "scheme"), [("light", "default"), ("dark", "slate")])
def test_the_scheme_is_the_one_that_the_reader_prefers(visit, preference, scheme):
    page = visit("index.html", prefers=preference)
    assert page.locator("body").get_attribute("data-md-color-scheme") == scheme


def test_the_search_finds_a_word_of_another_page(visit):
    page = visit("index.html")
    page.locator("[data-md-component=search-query]").click()
    page.keyboard.type("rendezvous")
    result = page.locator(".md-search-result__link", has_text="rendezvous").first
    result.wait_for()
    result.click()
    page.wait_for_url(re.compile(r".*\.html\?h=.*rendezvous.*"))
    assert "rendezvous" in page.locator("article").inner_text()


def test_the_scheme_can_be_switched(visit):
    page = visit("index.html")
    page.get_by_title("Switch to dark mode").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    page.get_by_title("Switch to light mode").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "default"


def test_texts_outside_the_folder_have_pages(site):
    assert (site / "changelog.html").is_file()
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in {".py", ".ipynb", ".sh", ".yaml"}]
    assert len(examples) > 10
    for path in examples:
        name = path.relative_to(ROOT / "examples").as_posix()
        assert f'id="{name.replace(".", "").replace("/", "")}"' in (site / "examples.html").read_text()
