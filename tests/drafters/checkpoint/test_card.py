"""The model card says what the scorecard and the recipe say, and nothing that they do not."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml
from cards import audit, card_of, row
from faces import V

from decode.errors import UserError
from drafters.checkpoint import io as hub
from drafters.checkpoint.model_card import Facts, model_card
from drafters.export.layout import Layout


@pytest.fixture
def facts(tiny_target, make_drafter):
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle", target, bias=False)
    origin = hub.origin_of(drafter, target, "acme/target-7b")._replace(revision="c" * 40, tokenizer="7" * 16)
    return Facts(drafter, "eagle", origin, card_of(), {"seed": 11})


def front(text: str) -> dict:
    _, matter, _ = text.split("---\n", 2)
    return yaml.safe_load(matter)


def test_the_front_matter_is_what_the_hub_reads(facts):
    matter = front(model_card(facts))
    assert matter["base_model"] == "acme/target-7b"
    assert matter["library_name"] == "foredraft"
    assert "eagle" in matter["tags"]
    assert "license" not in matter  # it is not ours to choose
    folder = facts._replace(origin=facts.origin._replace(name="/home/alice/models/pocket", revision=None))
    text = model_card(folder)
    assert "base_model" not in front(text)
    assert "alice" not in text
    assert "pocket" in text


def test_every_measured_number_is_in_the_table_with_where_it_was_measured(facts):
    text = model_card(facts)
    first = next(line for line in text.splitlines() if line.startswith("| chain-2 | 0 |"))
    cells = ["chain-2", "0", "1", "1.98 (1.73..2.23)", "2.00", "0.61", "0.37", "1.43x", "211.5", "147.9"]
    assert [cell.strip() for cell in first.strip("|").split("|")] == cells
    assert "| chain-2 | 1 | 8 | 1.52 (1.27..1.77) | - |" in text
    for part in ("Abacus 9000, 2 cores", "commit 0123456789ab", "prompts 12", "bfloat16", "load average 0.4"):
        assert part in text
    assert "Losslessness audit: passed. Of 640 greedy tokens 640" in text
    assert "3 are near ties and 0 mismatches; of 320 drawn tokens 0 were impossible." in text
    assert "- seed: `11`" in text
    assert "revision cccc" in text


@pytest.mark.parametrize("speedup", [0.8, 1.43])
def test_it_says_that_plain_decoding_was_faster(facts, speedup):
    text = model_card(facts._replace(score=card_of([row(speedup=speedup)])))
    assert ("No draft was faster than plain decoding on the machine that scored it" in text) == (speedup < 1)


def test_no_number_is_made_up(facts):
    """Without scorecard and recipe no measurement is left, and the card says that none is known."""
    text = model_card(facts._replace(score=None, recipe=None))
    assert "It comes without a scorecard" in text
    assert "Nothing was written down beside it" in text
    body = text.partition("## Score")[2]
    assert not re.findall(r"\d+\.\d+", body)
    assert "speedup:" not in body


def test_what_is_no_headline_is_called_what_it_is(facts):
    lossy = card_of(rows=[row(0.0, 1, 1.98), row(0.0, 1, 3.0, lossy=True)])
    assert "chain-2 (lossy)" in model_card(facts._replace(score=lossy))
    failed = card_of(audit=audit(mismatches=9))
    assert "Losslessness audit: FAILED" in model_card(facts._replace(score=failed))
    control = model_card(facts._replace(score=card_of(control="shuffled_taps")))
    assert "control=shuffled_taps: this is a control, no real score" in control
    moved = {"kl": 0.0071, "reverse_kl": 0.008, "top1_agreement": 0.967, "greedy_prefix": 0.5}
    moved |= {"prompts": 4, "tokens": 24}
    text = model_card(facts._replace(score=card_of(lossless_to="tuned target", target_drift=moved)))
    assert "no longer the original: KL 0.0071" in text
    assert "96.7 %" in text


def test_it_says_how_to_serve(facts):
    text = model_card(facts._replace(repo="me/drafter"))
    assert "foredraft generate checkpoint=me/drafter target=acme/target-7b" in text
    assert "from_pretrained('me/drafter', target)" in text
    assert facts.origin.exports == ("vllm", "sglang", "authors")
    text = model_card(facts._replace(origin=facts.origin._replace(exports=("sglang",))))
    assert "foredraft export checkpoint=<this folder or repository> to=sglang" in text
    assert "to=vllm" not in text
    assert "No serving engine" in model_card(facts._replace(origin=facts.origin._replace(exports=())))
    theirs = model_card(
        facts._replace(to="vllm", layout=Layout({}, {}, "vllm serve {target} --with {drafter}"), repo="me/d")
    )
    assert "    vllm serve acme/target-7b --with me/d" in theirs
    assert "foredraft generate" not in theirs


@pytest.mark.parametrize(
    "broken",
    [
        {"rows": []},
        {"rows": 3},
        {"rows": [{}]},
        {"rows": [row(0.0, 1, 1.0) | {"tau": "<script>"}]},
        {"audit": 3},
        {"audit": []},
    ],
    ids=str,
)
def test_a_scorecard_that_is_none_is_one_line(facts, broken):
    with pytest.raises(UserError, match="its scorecard is damaged") as error:
        model_card(facts._replace(score=card_of(**broken)))
    assert "\n" not in str(error.value)


def test_text_of_others_ends_no_line_and_begins_no_markup(facts):
    evil = "x\n\n# Heading | <img src=y> [here](http://z)"
    text = model_card(
        facts._replace(
            score=card_of(rows=[row(0.0, 1, 2.0, decode=evil)], hardware=evil),
            recipe={"a": evil, evil: "`b`"},
        )
    )
    assert not [line for line in text.splitlines() if line.startswith("# Heading")]
    outside = re.sub("`[^`]*`", "", text)  # nothing is markup within code
    assert "<img" not in outside.replace("\\<img", "")
    json.dumps(front(text))
