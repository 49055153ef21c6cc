"""Text of others is escaped in a page, and a page requests nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from distill.report import page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def figure() -> go.Figure:
    made = go.Figure(go.Scatter(x=np.arange(3), y=[1.0, float("nan"), float("inf")], name=page.label(EVIL)))
    return made.update_layout(title=EVIL, xaxis={"title": {"text": "step"}})


def test_text_is_escaped_everywhere():
    parts = [
        page.tiles([(EVIL, EVIL, EVIL)]),
        page.section(EVIL, page.prose(EVIL), page.heading(EVIL), EVIL, caption=EVIL),
        page.section("x", page.table([EVIL], [[EVIL]]), page.facts([(EVIL, EVIL)]), wide=True),
        page.details(EVIL, page.pre(EVIL)),
        page.plot(figure(), EVIL),
    ]
    body = page.page(EVIL, parts, EVIL).partition("<body>")[2]
    assert "<img" not in body
    assert "<script>alert" not in body
    # Two scripts of the page's own, and the plot's data.
    assert len(re.findall(r"<script\b", body)) == 3


def test_a_plots_data_is_json_without_gaps_or_tags():
    text = str(page.plot(figure(), "says"))
    data = re.search(r'<script type="application/json">(.*)</script>', text, re.DOTALL)
    assert data is not None
    assert not set("<>&") & set(data[1])
    read = json.loads(data[1], parse_constant=pytest.fail)
    assert read["data"][0]["y"] == [1.0, None, None]
    assert read["data"][0]["x"] == [0, 1, 2]
    assert read["layout"]["title"]["text"] == EVIL
    assert "template" not in read["layout"]


def test_the_policy_allows_only_the_pages_scripts():
    text = page.page("x", [page.plot(figure(), "says")])
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert found is not None
    rules = dict(rule.strip().split(" ", 1) for rule in found[1].replace("&#39;", "'").split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules  # so that `default-src` counts
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert rules["script-src"].split() == [f"'sha256-{h}'" for h in hashes]
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?!data:)", text.partition("<body>")[0])


def test_plotly_is_included_once_where_needed():
    plots = page.page("x", [page.plot(figure(), "a"), page.plot(figure(), "b")])
    assert plots.count("plotly.js v") == 1
    assert "plotly.js v" not in page.page("x", [page.prose('class="plot"')])
