"""The page of all drafters of a target: their bound, and which to use when."""

from __future__ import annotations

import pytest
from compared import FAST, SLOW, TOKENS, card, row
from workbench import foredraft

from decode.errors import UserError
from distill.report.field import advice, bound, field_page
from distill.scoring.compare import Choice, read

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


def test_the_bound_takes_the_best_drafter_for_each_prompt(runs):
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


def test_the_bound_is_over_drafters_of_the_same_text(tmp_path, runs):
    other = card(tmp_path / "d", [row(FAST, tokens=[9] * 6)], "lyanna")
    tuned = card(tmp_path / "e", [row([1.0] * 6)], "medusa2", target_drift=DRIFT)
    skip = card(tmp_path / "s", [row([7.0] * 6, speedup=0.9)], "skip", step=0, parameters=0)
    assert bound(pairs([*runs, other, tuned, skip])[1]) == bound(pairs(runs)[1])
    assert bound(pairs([runs[0], other, tuned])[1]) is None
    assert advice(read([*runs, skip]), COLD) == advice(read(runs), COLD)


def test_the_advice_for_each_need(runs):
    found = [line[1] for line in advice(read(runs), COLD)]
    fast, cheap = "eagle, chain-2", "suffix, chain-2"
    assert found == [fast, cheap, cheap, cheap, "medusa, chain-2", "eagle, chain-2 topk LOSSY"]


def test_lenience_is_lossless_at_temperature_0(tmp_path):
    lossy = {"lossy": True, "replay": None, "quality": QUALITY}
    rows = [row(FAST), row(FAST, rule="lenience", decode="lenience LOSSY", **lossy)]
    rows += [row(FAST, 1.0), row(FAST, 1.0, rule="lenience", decode="lenience LOSSY", **lossy)]
    (scored,) = read([card(tmp_path / "a", rows)])
    assert [len(scored.lossy(temperature, 1)) for temperature in (0.0, 1.0)] == [0, 1]


def test_plain_decoding_is_advised_where_no_draft_pays(tmp_path):
    run = card(tmp_path / "a", [row(FAST, speedup=0.8)])
    assert "plain decoding" in [line[1] for line in advice(read([run]), COLD)]


def test_every_drafter_is_on_the_page_and_lossy_rows_are_marked(runs, tmp_path):
    tuned = card(tmp_path / "e", [row([9.0] * 6)], "medusa2", target_drift=DRIFT, lossless_to="tuned target")
    page = field_page(read([*runs, tuned]), COLD)
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| medusa2", "| eagle", "| suffix", "| medusa"]
    assert lines[2].endswith("lossless to the tuned target: KL 0.02, likeliest token the same at 97.0% |")
    assert lines[3].endswith("lossless to the target |")
    assert "| chain-2 topk LOSSY | 8.00~" in lines[6]
    assert lines[6].endswith("LOSSY: log p -1.20 (-0.90), 0.8% of tokens changed |")
    assert "**Bound.** Of the 3 drafters that were scored on the same answers" in page


def test_the_command_writes_the_page_of_one_target(runs, tmp_path):
    foredraft("compare", *runs, "--field", str(tmp_path / "field.md")).succeeded()
    assert (tmp_path / "field.md").read_text() == field_page(read(runs), Choice([0.0]))
    other = card(tmp_path / "d", [row(FAST)], "lyanna", target="user/other")
    with pytest.raises(UserError, match="--field needs runs of one target"):
        field_page(read([*runs, other]), COLD)
