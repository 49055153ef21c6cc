"""The site builds without a network, loads nothing from elsewhere, and says what the code says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from documented import drafter_options
from workbench import CONF, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in (DOCS / "drafters").glob("*.md"))  # those that somebody wrote
MARKDOWN = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "data").rglob("*.md")]
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+https?://[^>]*>|<link[^>]+rel=\"?(?:style|preconn)[^>]+https?://[^>]*>"
)


# Elements of the page that reach over its edge, but for those inside something that scrolls.
TOO_WIDE = """
const scrolls = e => e.tagName !== 'BODY' && e.tagName !== 'HTML' &&
  (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) || scrolls_above(e));
const scrolls_above = e => e.parentElement ? scrolls(e.parentElement) : false;
const edge = Math.min(innerWidth, document.documentElement.clientWidth);
return [...document.querySelectorAll('article *')].filter(e => e.getClientRects().length &&
  getComputedStyle(e).position !== 'absolute' && e.getBoundingClientRect().right > edge + 1 &&
  !scrolls_above(e)).map(e => e.tagName + ': ' + e.textContent.slice(0, 40));
"""
# Words in cells of tables that are on two lines, or that are wider than their cell.
BROKEN_WORDS = r"""
const found = [];
for (const cell of document.querySelectorAll('article td, article th')) {
  if (cell.scrollWidth > cell.clientWidth + 1) found.push('wider: ' + cell.textContent.slice(0, 40));
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/[\p{L}\p{N}_]+/gu)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
      if (tops.size > 1) found.push('broken: ' + word[0]);
    }
}
return found;
"""


def cells(page: str, heading: str) -> list[list[str]]:
    """Rows of the table below a heading, without its head."""
    lines = [line for line in page.partition(f"## {heading}\n")[2].split("\n## ")[0].splitlines() if line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "scripts/build_site.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def window(site):
    with pytest.importorskip("browser").browser() as opened:
        yield opened


@pytest.mark.docs
def test_it_builds_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # the README and its like are there as well
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    assert "googleapis" not in (site / "index.html").read_text()
    assert (site / "search.js").stat().st_size > 100_000
    reference = (site / "api" / "drafters.html").read_text()
    assert 'id="drafters.base.Drafter.unroll"' in reference


@pytest.mark.docs
def test_its_search_works_from_the_disk_in_a_browser(site, window):
    window.open(site / "start.html", 1280)
    window.driver.find_element("css selector", ".md-search__button").click()
    field = "return document.activeElement.shadowRoot?.activeElement"
    until(lambda: window.run(field))
    window.run(field).send_keys("losslessness")
    links = "return [...document.activeElement.shadowRoot.querySelectorAll('a[href]')].map(a => a.href)"
    until(lambda: any("/lossless.html" in link for link in window.run(links)))
    assert not window.complaints()
    assert all(address.startswith("file:") for address in window.requests())


def until(done, seconds=20.0):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.docs
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_and_its_tables_break_no_word(site, window, width):
    """Tables scroll inside themselves; at 390 CSS pixels too no page scrolls sideways."""
    found = {}
    for page in sorted(site.rglob("*.html")):
        window.open(page, width)
        until(lambda: window.run("return document.readyState === 'complete'"))
        wrong = window.run(TOO_WIDE) + window.run(BROKEN_WORDS) + ["page"] * (window.overflow() > 0)
        if wrong:
            found[str(page.relative_to(site))] = wrong[:5]
        assert all(address.startswith("file:") for address in window.requests()), page
    assert not found


@pytest.mark.docs
def test_measures_of_a_page_find_what_they_are_for(tmp_path, window):
    cells = "<table style='table-layout: fixed; width: 60px'><tr>{}</tr></table>"
    head = "<!doctype html><meta name='viewport' content='width=device-width'>"
    page = tmp_path / "page.html"
    for inside, what in [
        (cells.format("<td style='overflow-wrap: anywhere'>unbreakable</td><td>b</td>"), BROKEN_WORDS),
        (cells.format("<td style='word-break: break-all'>drafter_name</td><td>b</td>"), BROKEN_WORDS),
        (cells.format("<td>unbreakable</td><td>b</td>"), BROKEN_WORDS),
        ("<div style='overflow: hidden'><p style='width: 900px'>wide</p></div>", TOO_WIDE),
        ("<table style='width: 900px'><tr><td>wide</td></tr></table>", TOO_WIDE),
    ]:
        page.write_text(f"{head}<article>{inside}</article>")
        window.open(page, 390)
        assert window.run(what)
    inside = "<table><tr><td style='white-space: nowrap'>whole words</td><td>well-known</td></tr></table>"
    page.write_text(f"{head}<article><div style='overflow-x: auto; width: 90px'>{inside}</div></article>")
    window.open(page, 390)
    assert window.run(TOO_WIDE) + window.run(BROKEN_WORDS) == []


@pytest.mark.docs
def test_menu_has_four_kinds_and_no_page_is_raw_output(site):
    tabs = (site / "index.html").read_text().partition("md-tabs__list")[2].partition("</ul>")[0]
    assert re.findall(r"md-tabs__link[^>]*>\s*(\S+?)\s*<", tabs) == ["Start", "How-to", "Reference", "Ideas"]
    for document in MARKDOWN:
        lines = [line for line in document.read_text().splitlines() if line.strip()]
        output = re.findall(r"^```text\n(.*?)^```", document.read_text(), flags=re.S | re.M)
        assert sum(part.count("\n") for part in output) <= len(lines) / 2, document


@pytest.mark.parametrize("document", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_as_github_reads_them(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
        assert (document.parent / link).exists(), f"{document.name}: {link}"


# -- a page for every drafter --------------------------------------------------------------------


@pytest.mark.docs
def test_every_drafter_has_a_page_and_a_line_in_the_menu(site):
    files = [path for path in (CONF / "drafter").glob("*.yaml") if path.stem != "auto"]  # a choice of them
    drafters = sorted(path.stem for path in files)
    assert sorted(path.stem for path in (site / "drafters").glob("*.html")) == drafters
    menu = (site / "drafters.html").read_text().partition('<nav class="md-nav')[2]
    assert set(drafters) <= set(
        re.findall(r'href="(?:\./)?drafters/(\w+)\.html"[^>]*class="md-nav__link', menu)
    )


@pytest.mark.parametrize("documented", PAGES)
def test_a_page_names_the_class_and_the_options_that_there_are(documented):
    page = (DOCS / "drafters" / f"{documented}.md").read_text()
    options = drafter_options(documented)
    module, _, name = options["_target_"].removesuffix(".for_target").rpartition(".")
    assert f"`{module}.{name}`" in page
    assert hasattr(importlib.import_module(module), name)
    rows = cells(page, "Options that matter")
    assert rows
    for option, default, said in rows:
        key = option.strip("`").removeprefix("drafter.")
        assert key in options, f"{option} is no option"
        assert yaml.safe_load(default.strip("`")) == options[key], f"{option}: {default}"
        assert said
    papers = set(re.findall(r"arXiv:(\d+\.\d+)", (CONF / "drafter" / f"{documented}.yaml").read_text()))
    assert papers <= set(re.findall(r"arXiv:(\d+\.\d+)", page))
    assert re.search(rf"    python train\.py .*{documented}\b", page)


@pytest.mark.parametrize("documented", PAGES)
def test_a_pages_own_figures_are_written_from_scorecards(documented):
    page = (DOCS / "drafters" / f"{documented}.md").read_text()
    (words,) = re.findall(r"<!-- results: (.*) -->", page)
    assert re.search(rf"\b{documented}-\d", words)
    assert not [row for row in cells(page, "Figures") if row[0] == "here"]
