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


def cells(page: str, heading: str) -> list[list[str]]:
    """Rows of the table below a heading, without its head."""
    lines = [line for line in page.partition(f"## {heading}\n")[2].split("\n## ")[0].splitlines() if line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.docs
def test_it_builds_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # the README and its like are there as well
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    assert "googleapis" not in (site / "index.html").read_text()
    assert (site / "search" / "search_index.js").stat().st_size > 100_000
    reference = (site / "api" / "drafters.html").read_text()
    assert 'id="drafters.base.Drafter.unroll"' in reference


@pytest.mark.docs
def test_its_search_works_from_the_disk_in_a_browser(site):
    with pytest.importorskip("browser").browser() as window:
        window.open(site / "start.html", 1280)
        window.driver.find_element("css selector", "input.md-search__input").send_keys("losslessness")
        end, found = time.monotonic() + 20, []
        while not found and time.monotonic() < end:
            time.sleep(0.05)
            found = window.driver.find_elements("css selector", ".md-search-result__item")
        assert found
        assert not window.complaints()
        assert all(address.startswith("file:") for address in window.requests())
        window.open(site / "drafters.html", 390)
        assert window.overflow() <= 0


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
    assert set(drafters) <= set(re.findall(r'href="?drafters/(\w+)\.html"?[^>]*class="?md-nav__link', menu))


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
def test_a_pages_own_figures_are_those_of_the_overview(documented):
    """Or it says that there are none."""
    page = (DOCS / "drafters" / f"{documented}.md").read_text()
    here = next(row for row in cells(page, "Figures") if row[0] == "here")
    if here[1] == "not measured":
        assert here[1:4] == ["not measured"] * 3
        return
    overview = (DOCS / "drafters.md").read_text().splitlines()
    row = next(line for line in overview if re.match(rf"\| {documented}( |\()", line))
    for figure in filter(None, here[1:4]):
        assert re.search(rf"\| {re.escape(figure)}[ |]", row), f"{figure} is not in {row}"
