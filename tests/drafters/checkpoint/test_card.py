"""The model card says what the scorecard and the recipe say, and no more."""

from __future__ import annotations

import re

import pytest
import torch
import yaml
from cards import audit, card_of, row
from faces import V

from decode.errors import UserError
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.model_card import Facts, model_card
from drafters.export.layout import Layout


@pytest.fixture
def facts(tiny_target, make_drafter):
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle", target, bias=False)
    origin = checkpoint_io.origin_of(drafter, target, "acme/target-7b")
    origin = origin._replace(revision="c" * 40, tokenizer="7" * 16)
    return Facts(drafter, "eagle", origin, card_of(), {"seed": 11})


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n", 2)[1])


def test_the_front_matter_is_what_the_hub_reads(facts):
    matter = front(model_card(facts))
    assert (matter["base_model"], matter["library_name"]) == ("acme/target-7b", "foredraft")
    assert "eagle" in matter["tags"]
    assert "license" not in matter  # it is not ours to choose
    text = model_card(facts._replace(origin=facts.origin._replace(name="/home/alice/pocket", revision=None)))
    assert "base_model" not in front(text)
    assert "alice" not in text
    assert "pocket" in text


def test_every_measured_number_is_in_the_table_with_where_it_was_measured(facts):
    text = model_card(facts)
    first = next(line for line in text.splitlines() if line.startswith("| chain-2 | 0 |"))
    cells = ["chain-2", "0", "1", "1.98 (1.73..2.23)", "2.00", "0.61", "0.37", "1.43x", "211.5", "147.9"]
    assert [cell.strip() for cell in first.strip("|").split("|")] == cells
    assert "| chain-2 | 1 | 8 | 1.52 (1.27..1.77) | - |" in text
    parts = ["Abacus 9000, 2 cores", "commit 0123456789ab", "prompts 12", "bfloat16", "load average 0.4"]
    parts += ["audit: passed. Of 640 greedy tokens", "- seed: `11`", "revision cccc"]
    assert all(part in text for part in parts)


def test_no_number_is_made_up(facts):
    """Without scorecard and recipe no measurement is left."""
    body = model_card(facts._replace(score=None, recipe=None)).partition("## Score")[2]
    assert "no scorecard" in body
    assert not re.findall(r"\d+\.\d+", body)
    assert "speedup:" not in body


def test_scores_that_are_no_headline_are_marked(facts):
    drift = {"kl": 0.0071, "reverse_kl": 0.008, "top1_agreement": 0.967, "greedy_prefix": 0.5}
    drift |= {"prompts": 4, "tokens": 24}
    marked = {
        "chain-2 (lossy)": card_of([row(0.0, 1, 1.98), row(0.0, 1, 3.0, lossy=True)]),
        "audit: FAILED": card_of(audit=audit(mismatches=9)),
        "no real score": card_of(control="shuffled_taps"),
        "no longer the original: KL 0.0071": card_of(lossless_to="tuned target", target_drift=drift),
        "No draft was faster than plain decoding": card_of([row(speedup=0.8)]),
    }
    plain = model_card(facts)
    for words, score in marked.items():
        assert words in model_card(facts._replace(score=score))
        assert words not in plain


def test_it_says_how_to_serve(facts):
    text = model_card(facts._replace(repo="me/drafter"))
    assert "foredraft generate checkpoint=me/drafter target=acme/target-7b" in text
    assert facts.origin.exports == ("vllm", "sglang", "authors")
    text = model_card(facts._replace(origin=facts.origin._replace(exports=("sglang",))))
    assert "to=sglang" in text
    assert "to=vllm" not in text
    assert "No known engine" in model_card(facts._replace(origin=facts.origin._replace(exports=())))
    layout = Layout({}, {}, "vllm serve {target} --with {drafter}")
    theirs = model_card(facts._replace(to="vllm", layout=layout, repo="me/d"))
    assert "    vllm serve acme/target-7b --with me/d" in theirs
    assert "foredraft generate" not in theirs


@pytest.mark.parametrize(
    "broken",
    [{"rows": []}, {"rows": 3}, {"rows": [{}]}, {"rows": [row() | {"tau": "<script>"}]}, {"audit": 3}],
    ids=str,
)
def test_a_damaged_scorecard_is_one_line(facts, broken):
    with pytest.raises(UserError, match="its scorecard is damaged") as error:
        model_card(facts._replace(score=card_of(**broken)))
    assert "\n" not in str(error.value)


def test_text_of_others_ends_no_line_and_begins_no_markup(facts):
    evil = "x\n\n# Heading | <img src=y> [here](http://z)"
    score = card_of(rows=[row(0.0, 1, 2.0, decode=evil)], hardware=evil)
    text = model_card(facts._replace(score=score, recipe={"a": evil, evil: "`b`"}))
    assert not [line for line in text.splitlines() if line.startswith("# Heading")]
    outside = re.sub("`[^`]*`", "", text)  # nothing is markup within code
    assert "<img" not in outside.replace("\\<img", "")
    assert isinstance(front(text), dict)
