"""The page of several runs."""

import json
import re

import pytest
from browser import browser
from compared import FAST, SLOW, card, row, timing

from distill.report.compare_page import page_of
from distill.report.readme_results import results
from distill.scoring.compare import Choice, read

EVIL = "</script><script>alert(1)</script><b>"
TREE = "tree-7 (depth 3, width 3)"


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Three runs at two batch sizes, one of which has a script as its name."""
    root = tmp_path_factory.mktemp("runs")
    kinds = {"categories": ["code", "code", "chat", "chat", "code", ""]}

    def run(name, speed, rounds):
        close = timing(speed - 0.1, speed, speed + 0.1, speed, speed)
        wide = row(rounds, batch=8, speedup=speed - 0.7, decode=TREE)
        rows = [row(rounds, speedup=speed, timing=close), wide]
        return f"{name}={card(root / str(speed), rows, **kinds)}"

    return read([run("slow", 1.1, SLOW), run(EVIL, 1.5, FAST), run("other", 0.8, [r + 2 for r in FAST])])


def plots(text):
    """Data of all plots."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return [json.loads(one) for one in found]


def test_plots_have_what_the_cards_have(scored):
    bars, costs, survival, batches = (plot["data"] for plot in plots(page_of(scored, Choice())))
    (bar,) = bars
    assert bar["x"] == [1.5, 1.1, 0.8]
    assert [y[:3] for y in bar["y"]] == ["&lt", "slo", "oth"]
    assert all(0 < length < 0.1 for side in ("array", "arrayminus") for length in bar["error_x"][side])
    # A quarter of 4 ms a token, 9 tokens a round; tau is the replayed one.
    assert (costs[0]["x"], costs[0]["y"]) == ([9.0], [157 / 63])
    assert [one["y"] for one in survival] == [[0.5, 0.25]] * 3
    speeds = [([1, 8], [speed, speed - 0.7]) for speed in (1.5, 1.1, 0.8)]
    assert [(one["x"], one["y"]) for one in batches] == speeds
    assert batches[0]["text"] == ["chain-2", TREE]


def test_a_batch_size_without_the_chosen_plan_is_left_out(scored):
    """decode=auto settles on another plan at another size."""
    found = plots(page_of(scored, Choice(decode="chain-2")))
    assert [len(plot["data"]) for plot in found] == [1, 3, 3]
    runs = results(scored, Choice(decode="chain-2"))["runs"]
    assert [[one["batch"] for one in run["speedup"]] for run in runs] == [[1]] * 3


def test_unknown_intervals_and_categories_are_not_drawn(scored, tmp_path):
    text = page_of(read([card(tmp_path, [row(FAST)])]), Choice())
    assert len(plots(text)) == 3
    assert "Kinds of prompts" not in text
    (bar,) = plots(text)[0]["data"]
    assert bar["error_x"]["array"] == [None]
    assert "Kinds of prompts" in page_of(scored, Choice())


@pytest.mark.docs
def test_a_browser_shows_it_and_sorts_by_a_click(scored, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(scored, Choice()))
    first = "return [...document.querySelectorAll('tbody')][0].rows[0].cells[0].textContent"
    with browser() as window:
        window.open(path, 1280)
        assert len(window.marks()) == 4
        assert all(window.marks()), window.marks()
        assert window.run(first) == EVIL
        orders = []
        for place in (0, 0, 2, 2, 3):  # names, names, speedup twice, and ratios, of which the best has none
            window.driver.find_elements("css selector", "button.sort")[place].click()
            orders.append(window.run(first))
        assert orders == [EVIL, "slow", EVIL, "other", "slow"]
        assert not window.overflow()
        window.open(path, 390, "dark")
        assert all(window.marks())
        assert not window.overflow()
        assert window.complaints() == []
        assert set(window.requests()) == {path.as_uri()}
