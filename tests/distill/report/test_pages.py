"""Pages: of one run, of several runs, of all drafters of a target; the fastest draft and what limits it."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from pkgutil import resolve_name

import cards
import numpy as np
import plotly.graph_objects as go
import pytest
from browser import browser
from compared import FAST, SLOW, TOKENS, card, row, timing
from workbench import CONF, foredraft

from decode.errors import UserError
from distill.config.compose import compose
from distill.report import page, panels
from distill.report.bottleneck import bottleneck
from distill.report.compare_page import page_of
from distill.report.field import HEAD, advice, bound, field_page
from distill.scoring import tables
from distill.scoring.compare import Choice, read
from distill.training.checkpointing import _rank, _summary
from distill.utils.atomic_files import write_json
from drafters.registry import KNOWN, class_name

SCRIPT = "</script><script>alert(1)</script><b>"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def evil_figure() -> go.Figure:
    made = go.Figure(go.Scatter(x=np.arange(3), y=[1.0, float("nan"), float("inf")], name=page.label(EVIL)))
    return made.update_layout(title=EVIL, xaxis={"title": {"text": "step"}})


def test_text_is_escaped_everywhere():
    parts = [
        page.tiles([(EVIL, EVIL, EVIL)]),
        page.section(EVIL, page.prose(EVIL), page.heading(EVIL), EVIL, caption=EVIL),
        page.section("x", page.table([EVIL], [[EVIL]]), page.facts([(EVIL, EVIL)]), wide=True),
        page.details(EVIL, page.pre(EVIL)),
        page.plot(evil_figure(), EVIL),
    ]
    body = page.page(EVIL, parts, EVIL).partition("<body>")[2]
    assert "<img" not in body
    assert "<script>alert" not in body
    # Two scripts of the page's own, and the plot's data.
    assert len(re.findall(r"<script\b", body)) == 3


def test_plots_data_is_json_without_gaps_or_tags():
    text = str(page.plot(evil_figure(), "says"))
    data = re.search(r'<script type="application/json">(.*)</script>', text, re.DOTALL)
    assert data is not None
    assert not set("<>&") & set(data[1])
    read = json.loads(data[1], parse_constant=pytest.fail)
    assert read["data"][0]["y"] == [1.0, None, None]
    assert read["data"][0]["x"] == [0, 1, 2]
    assert read["layout"]["title"]["text"] == EVIL
    assert "template" not in read["layout"]


def test_policy_allows_only_the_pages_scripts():
    text = page.page("x", [page.plot(evil_figure(), "says")])
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
    plots = page.page("x", [page.plot(evil_figure(), "a"), page.plot(evil_figure(), "b")])
    assert plots.count("plotly.js v") == 1
    assert "plotly.js v" not in page.page("x", [page.prose('class="plot"')])


TREE = "tree-7 (depth 3, width 3)"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three runs at two batch sizes, one of which has a script as its name."""
    root = tmp_path_factory.mktemp("runs")
    kinds = {"categories": ["code", "code", "chat", "chat", "code", ""]}

    def run(name, speed, rounds):
        close = timing(speed - 0.1, speed, speed + 0.1, speed, speed)
        wide = row(rounds, batch=8, speedup=speed - 0.7, decode=TREE)
        rows = [row(rounds, speedup=speed, timing=close), wide]
        return f"{name}={card(root / str(speed), rows, **kinds)}"

    return read([run("slow", 1.1, SLOW), run(SCRIPT, 1.5, FAST), run("other", 0.8, [r + 2 for r in FAST])])


def plots(text):
    """Data of all plots."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return [json.loads(one) for one in found]


def test_plots_have_what_the_cards_have(three):
    bars, costs, survival, batches = (plot["data"] for plot in plots(page_of(three, Choice())))
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


def test_batch_size_without_the_chosen_plan_is_left_out(three):
    """decode=auto settles on another plan at another size."""
    found = plots(page_of(three, Choice(decode="chain-2")))
    assert [len(plot["data"]) for plot in found] == [1, 3, 3]


def test_unknown_intervals_and_categories_are_not_drawn(three, tmp_path):
    text = page_of(read([card(tmp_path, [row(FAST)])]), Choice())
    assert len(plots(text)) == 3
    assert "Kinds of prompts" not in text
    (bar,) = plots(text)[0]["data"]
    assert bar["error_x"]["array"] == [None]
    assert "Kinds of prompts" in page_of(three, Choice())


@pytest.mark.docs
def test_browser_shows_it_and_sorts_by_a_click(three, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(three, Choice()))
    first = "return [...document.querySelectorAll('tbody')][0].rows[0].cells[0].textContent"
    with browser() as window:
        window.open(path, 1280)
        assert len(window.marks()) == 4
        assert all(window.marks()), window.marks()
        assert window.run(first) == SCRIPT
        orders = []
        for place in (0, 0, 2, 2, 3):  # names, names, speedup twice, and ratios, of which the best has none
            window.driver.find_elements("css selector", "button.sort")[place].click()
            orders.append(window.run(first))
        assert orders == [SCRIPT, "slow", SCRIPT, "other", "slow"]
        assert not window.overflow()
        window.open(path, 390, "dark")
        assert all(window.marks())
        assert not window.overflow()
        assert window.complaints() == []
        assert set(window.requests()) == {path.as_uri()}


COLD = Choice([0.0], by="tau")
DRIFT = {"kl": 0.02, "reverse_kl": 0, "top1_agreement": 0.97, "greedy_prefix": 1, "prompts": 6, "tokens": 90}
LOOKUP = {"step": 0, "parameters": 0, "drafter_kv_bytes_per_token": 0}
ODD = [12.0, 7.0, 20.0, 4.0, 9.0, 14.0]
QUALITY = {"log_likelihood": -1.2, "plain_log_likelihood": -0.9, "kl": None, "changed": 0.008, "judge": None}
QUALITY |= {"plain_judge": None}


@pytest.fixture
def runs(tmp_path):
    """Long drafts that cost much, cheap ones that are better on some prompts, and slow ones."""
    lossy = row(FAST, lossy=True, rule="topk", decode="chain-2 topk LOSSY", speedup=1.9, replay=None, tau=8.0)
    return [
        card(tmp_path / "a", [row(FAST, speedup=1.2, tau=2.5), {**lossy, "quality": QUALITY}], "eagle"),
        card(tmp_path / "b", [row(ODD, speedup=1.6, tau=2.4)], "suffix", **LOOKUP),
        card(tmp_path / "c", [row(SLOW, speedup=0.9, tau=1.5)], "medusa", train_seconds=30.0),
    ]


def pairs(runs):
    scored = read(runs)
    return scored, [(one, one.rows(COLD)[0]) for one in scored]


def test_bound_takes_the_best_drafter_for_each_prompt(runs):
    found = bound(pairs(runs)[1])
    assert (found.prompts, found.drafters) == (len(TOKENS), 3)
    least = [min(column) for column in zip(FAST, ODD, SLOW, strict=True)]
    assert found.tau.value == pytest.approx(sum(TOKENS) / sum(least))
    low, high = found.tau.interval
    assert low < found.tau.value < high
    prices = [2.5 / 1.2, 2.4 / 1.6, 1.5 / 0.9]  # passes of plain decoding that a round costs
    costs = [[r * c for r in rounds] for rounds, c in zip([FAST, ODD, SLOW], prices, strict=True)]
    passes = [min(*column) for column in zip(*costs, TOKENS, strict=True)]
    assert found.speedup == pytest.approx(sum(TOKENS) / sum(passes))
    name, speedup = found.single
    assert name == "suffix"
    assert speedup == pytest.approx(sum(TOKENS) / sum(costs[1]))
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["suffix"] > 0.5


def test_bound_is_over_drafters_of_the_same_text(tmp_path, runs):
    other = card(tmp_path / "d", [row(FAST, tokens=[9] * 6)], "lyanna")
    tuned = card(tmp_path / "e", [row([1.0] * 6)], "medusa2", target_drift=DRIFT)
    skip = card(tmp_path / "s", [row([7.0] * 6, speedup=0.9)], "skip", step=0, parameters=0)
    assert bound(pairs([*runs, other, tuned, skip])[1]) == bound(pairs(runs)[1])
    assert bound(pairs([runs[0], other, tuned])[1]) is None
    both = [[line[:2] for line in advice(read(some), COLD)] for some in ([*runs, skip], runs)]
    assert both[0] == both[1]


def test_advice_for_each_need(runs, tmp_path):
    found = [line[1] for line in advice(read(runs), COLD)]
    fast, cheap = "eagle, chain-2", "suffix, chain-2"
    assert found == [fast, cheap, cheap, cheap, "medusa, chain-2", "eagle, chain-2 topk LOSSY"]
    speeds = {line[0]: line[2] for line in advice(read(runs), COLD)}
    assert "told apart" not in speeds["passes of the target count (a GPU, a large target)"]
    assert speeds["this machine, as it is"].endswith("; not told apart from eagle, medusa")  # none is timed
    slow = read([card(tmp_path / "slow", [row(FAST, speedup=0.8)])])
    assert "plain decoding" in [line[1] for line in advice(slow, COLD)]


def test_lenience_is_lossless_at_temperature_0(tmp_path):
    lossy = {"lossy": True, "replay": None, "quality": QUALITY}
    rows = [row(FAST), row(FAST, rule="lenience", decode="lenience LOSSY", **lossy)]
    rows += [row(FAST, 1.0), row(FAST, 1.0, rule="lenience", decode="lenience LOSSY", **lossy)]
    (scored,) = read([card(tmp_path / "a", rows)])
    assert [len(scored.lossy(temperature, 1)) for temperature in (0.0, 1.0)] == [0, 1]


def test_drafters_are_on_the_page_and_lossy_rows_marked(runs, tmp_path):
    tuned = card(tmp_path / "e", [row([9.0] * 6)], "medusa2", target_drift=DRIFT, lossless_to="tuned target")
    page = field_page(read([*runs, tuned]), COLD)
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| medusa2", "| eagle", "| suffix", "| medusa"]
    assert lines[2].endswith("lossless to the tuned target: KL 0.02, likeliest token the same at 97.0% |")
    assert lines[3].endswith("lossless to the target |")
    assert "| chain-2 topk LOSSY | 8.00~" in lines[6]
    assert lines[6].endswith("LOSSY: log p -1.20 (-0.90), 0.8% of tokens changed |")
    assert "**Bound.** Of the 3 drafters that were scored on the same answers" in page


def test_page_of_downloaded_scorecards_has_no_control_characters_and_no_lines_of_theirs(tmp_path):
    bad = "a\x1b[2J|b\r\n\n# c\u202e"
    forged = {"decode": bad, "speedup": 1.5}
    several = [card(tmp_path / str(i), [row(FAST, **forged)], bad, target=bad, hardware=bad) for i in (1, 2)]
    page = field_page(read([f"{bad}={several[0]}", several[1]]), COLD)
    assert page.replace("\n", "").isprintable()
    assert [line for line in page.splitlines() if line.startswith("# ")] == [
        "# All drafters of a\ufffd[2J|b\ufffd # c\ufffd"
    ]
    columns = {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| ")}
    assert columns == {len(HEAD) + 1, 4}


def test_command_writes_the_page_of_one_target(runs, tmp_path):
    foredraft("compare", *runs, "--field", str(tmp_path / "field.md")).succeeded()
    assert (tmp_path / "field.md").read_text() == field_page(read(runs), Choice([0.0]))
    other = card(tmp_path / "d", [row(FAST)], "lyanna", target="user/other")
    with pytest.raises(UserError, match="--field needs runs of one target"):
        field_page(read([*runs, other]), COLD)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        # A round of 2 plain passes: 1.2 verify, 0.6 draft, 0.2 the rest.
        ((3.0, 1.5, 0.3, 0.6), r"2\.00 .* 1\.20, .* 0\.60, .* 0\.20.* limit is drafting; .* 2\.14x"),
        ((3.0, 1.5, 0.05, 0.9), r"1\.80, .* 0\.10, .* 0\.10.* limit is verifying; .* 2\.50x"),
        ((1.5, 1.1, 0.3, 0.6), "limit is acceptance"),
        ((0.0, 0.0, 0.0, 0.0), "^$"),
    ],
)
def test_largest_cost_or_low_acceptance_is_named(shares, said):
    one = dict(zip(("tau", "speedup", "draft_share", "verify_share"), shares, strict=True))
    assert re.search(said, bottleneck(cards.card_of([cards.row(0.0, **one)])))


@functools.cache
def options_by_kind() -> dict[str, list[set[str]]]:
    """Options of every configuration of a drafter, by the short name of its class."""
    found: dict[str, list[set[str]]] = {}
    for path in sorted((CONF / "drafter").glob("*.yaml")):
        if path.stem == "auto":
            continue
        options = compose([f"drafter={path.stem}"], CONF).drafter
        kind = class_name(resolve_name(options._target_.rpartition(".")[0]))
        found.setdefault(kind, []).append(set(map(str, options)))
    return found


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_advice_names_only_options_that_the_drafter_has(kind):
    configured = options_by_kind()[kind]
    advised = set()
    for step, shares in itertools.product(
        (0, 600), ((3.0, 1.5, 0.3, 0.6), (3.0, 1.5, 0.05, 0.9), (1.5, 1.1))
    ):
        one = dict(zip(("tau", "speedup", "draft_share", "verify_share"), shares, strict=False))
        said = bottleneck(cards.card_of([cards.row(0.0, **one)], drafter=kind, step=step))
        assert said
        assert ("trainer.max_steps" in said) == (bool(step) and "limit is acceptance" in said)
        assert f"drafter={kind}" not in said
        advised |= set(re.findall(r"drafter\.(\w+)", said))
    assert all(advised <= options for options in configured), f"{kind} has no {advised}"
    assert bool(advised) == all("draft_vocab_size" in options for options in configured)


def test_fewer_nodes_are_advised_only_of_a_tree():
    shares = {"tau": 3.0, "speedup": 1.5, "draft_share": 0.05, "verify_share": 0.9}
    tree, chain = (bottleneck(cards.card_of([cards.row(0.0, nodes=n, **shares)])) for n in (8, 2))
    assert "try fewer nodes (decode.nodes), a GPU, or a deeper target" in tree
    assert "try a shorter draft (decode.depth), a GPU, or a deeper target" in chain


def test_fastest_draft_is_lossless_and_of_the_first_setting():
    rows = [
        cards.row(0.0, decode="tree-16", speedup=1.2),
        cards.row(0.0, decode="tree-8", speedup=1.5),
        cards.row(0.0, decode="typical", speedup=1.9, lossy=True),
        cards.row(1.0, decode="hybrid", speedup=1.8),
        cards.row(0.0, decode="wide", speedup=1.7, batch_size=8),
    ]
    assert cards.card_of(rows).fastest.decode == "tree-8"
    assert bottleneck(cards.card_of(rows)).startswith("1.50x by tree-8: ")


TIMES = {"seconds": [2.5] * 6, "tokens": [100] * 6, "plain_seconds": [2.0] * 6, "plain_tokens": [100] * 6}
SHARES = {"draft_share": 0.4, "verify_share": 0.55}
SLOW_DRAFT = cards.row(0.0, decode="chain-3", tau=2.5, speedup=0.8, timing=TIMES, **SHARES)
SLOWER = cards.row(0.0, decode="tree-8", tau=2.9, speedup=0.7, **SHARES)
NOTHING = {"nodes": 0, "survival": [], "alpha": [], "offered": [], "draft_share": 0.0}
PLAIN = cards.row(0.0, decode="plain", tau=1.0, speedup=1.02, **NOTHING)


@pytest.mark.parametrize(
    "rows", [[SLOWER, SLOW_DRAFT], [PLAIN, SLOWER, SLOW_DRAFT]], ids=["draft", "decode=auto"]
)
def test_no_draft_is_advised_where_plain_is_fastest(rows, tmp_path):
    one = cards.card_of(rows)
    assert not one.pays
    said = bottleneck(one)
    assert said.startswith("do not draft: ")
    assert "chain-3, is 0.80x (0.80..0.80): a timed round writes 2.50 tokens (tau_decoded) in the" in said
    assert "time of 3.12 plain" in said
    page = str(panels.headline(one))
    assert f">{one.compared.speedup:.2f}×<" in page, "of the draft with the headline's tau"
    assert "do not draft here" in page
    assert "chain-3, 0.80×" in page
    assert "1.02" not in page
    write_json(tmp_path / "score.json", one.to_json())
    line = _summary(4, 8, 1.0, tmp_path)
    said = "tau 2.92 (2.72..3.12, replayed)  speedup 0.70x  tree-8, T=0, batch 1  audit pass"
    assert f"{said}  no draft faster than plain" in line


def test_draft_that_pays_is_named_next_to_plain_decoding():
    one = cards.card_of([PLAIN, cards.row(0.0, decode="chain-1", speedup=1.1)])
    assert one.pays
    assert bottleneck(one).startswith("1.10x by chain-1: ")
    assert ">1.10×<" in str(panels.headline(one))
    plain = cards.card_of([PLAIN])
    assert not plain.pays
    assert bottleneck(plain) == ""


def test_checkpoint_whose_draft_pays_is_better_than_all_others(tmp_path):
    """The others are ranked by the draft, even where plain decoding was chosen."""
    taus = {"a": [PLAIN, SLOW_DRAFT], "b": [PLAIN, SLOWER], "c": [cards.row(0.0, decode="chain-1", tau=1.6)]}
    for name, rows in taus.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "score.json", cards.scorecard(rows))
    (tmp_path / "unscored").mkdir()
    paths = [tmp_path / name for name in ("unscored", "a", "c", "b")]
    assert [path.name for path in sorted(paths, key=_rank)] == ["unscored", "a", "b", "c"]
    chosen = cards.card_of(taus["a"])
    assert "  chain-3, T=0, batch 1 (plain was chosen), " in tables.headline(chosen)
    assert [line[-2:] for line in tables.by_step([chosen])[1]] == [["5%", "pass"]]
