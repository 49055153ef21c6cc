"""Whether a drafter can be exported is known without its weights, and what the answer suggests works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from faces import V
from transformers import GPT2Config, GPT2LMHeadModel

from decode.errors import UserError
from drafters.checkpoint import io as hub
from drafters.export import formats
from drafters.registry import short_name

LAST = "last"


def scaled(target):
    """As Gemma's."""
    target.embed.embed_scale = 4.0


def biased(target):
    target.head = replace(target.head, bias=torch.zeros(V))


def plain(target):
    """Nothing is particular about it."""


# drafter, its settings, layers of the target, what is particular about the target
REFUSED = {
    "taps of a small target": ("eagle3", {"taps": [2, LAST]}, 4, plain),
    "the head's input alone": ("eagle3", {"taps": [LAST]}, 8, plain),
    "one tap twice": ("eagle3", {"taps": [2, 2, 2]}, 5, plain),
    "the embedding": ("eagle3", {"taps": [0, LAST]}, 8, plain),
    "two layers": ("eagle3", {"taps": [0], "layers": 2}, 8, plain),
    "everything at once": (
        "eagle3",
        {"taps": [0, 3, 3, LAST], "layers": 2, "norm_before_residual": True},
        8,
        plain,
    ),
    "layers of which none is left": ("eagle3", {"taps": [0, LAST]}, 1, plain),
    "eagle3 of Gemma": ("eagle3", {"taps": [1, 2]}, 8, scaled),
    "p_eagle": ("p_eagle", {"taps": [1, LAST], "fc_norm": False}, 8, plain),
    "p_eagle of one tap": ("p_eagle", {"taps": [3, 3]}, 8, plain),
    "p_eagle of one tap behind a norm": ("p_eagle", {"taps": [3]}, 8, plain),
    "dflash": ("dflash", {"taps": [0, LAST]}, 8, plain),
    "dflash of one layer": ("dflash", {"taps": [0, LAST]}, 1, plain),
    "dflash of a head with a bias": ("dflash", {"taps": [2, 4]}, 8, biased),
    "dspark": ("dspark", {"taps": [0, LAST], "sample_from_anchor": False, "draft_vocab_size": 5}, 8, plain),
    "dspark of Gemma": ("dspark", {"taps": [1, 2]}, 8, scaled),
    "diffusion": ("diffusion", {}, 8, plain),
    "diffusion of Gemma": ("diffusion", {}, 8, scaled),
    "eagle": ("eagle", {"bias": True}, 2, plain),
    "eagle of Gemma": ("eagle", {"bias": True}, 2, scaled),
    "eagle of a head with a bias": ("eagle", {"bias": False}, 2, biased),
    "medusa": ("medusa", {"token_info": "gated"}, 2, plain),
    "medusa of a head with a bias": ("medusa", {"token_info": "gated"}, 2, biased),
    "medusa of Gemma": ("medusa", {}, 2, scaled),
    "hydra": ("hydra", {}, 2, plain),
    "lstm": ("lstm", {}, 2, plain),
    "ngram": ("ngram", {}, 2, plain),
}


def refusal(drafter, target, to) -> str:
    """What `check` says without weights; it is what the export says with them."""
    said = []
    for attempt in (
        lambda: formats.check(short_name(drafter), drafter.settings, target, to),
        lambda: formats.write_layout(hub.as_saved(drafter), target, to),
    ):
        try:
            attempt()
            said.append("")
        except UserError as error:
            said.append(str(error))
    before, after = said
    assert before == after
    return before


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_refusal_suggests_is_accepted(case, tiny_target, make_drafter):
    name, options, layers, particular = REFUSED[case]
    target = tiny_target(vocab=V, layers=layers, hidden=16, dtype=torch.float32)
    target.model.config._name_or_path = target.model.name_or_path = "some/target"
    drafter = make_drafter(name, target, **options)
    particular(target)
    accepting = formats.accepting(short_name(drafter), drafter.settings, target)
    said = {to: refusal(drafter, target, to) for to in formats.FORMATS if to != "hf"}
    assert any(said.values())
    for to, text in said.items():
        assert bool(text) is (to not in accepting)
        if not text:
            continue
        assert "\n" not in text
        assert re.search(r"set to=[\w ]*native$", text)
        others = [
            word for word in re.findall(r"\w+", text.partition("set to=")[2]) if word not in ("or", "native")
        ]
        assert others == accepting
        changed = dict(re.findall(r"drafter\.(\w+)=(\S+?)(?=,? |$|; )", text.partition("train with ")[2]))
        if changed:
            settings = {key: yaml.safe_load(value) for key, value in changed.items()}
            assert refusal(make_drafter(name, target, **options | settings), target, to) == ""
        elif other := re.search(r"train drafter=(\w+)", text):
            assert refusal(make_drafter(other[1], target), target, to) == ""
        else:
            assert not (name == "p_eagle" and to == "speculators")
            own = "of its own" in text  # the engine has the method itself
            assert own or accepting or "no engine takes this drafter" in text


def test_a_small_target_is_told_taps_that_engines_take(tiny_target, make_drafter):
    for layers in range(1, 7):
        target = tiny_target(vocab=V, layers=layers, hidden=16, dtype=torch.float32)
        with pytest.raises(UserError, match="engines have no last") as error:
            make_drafter("eagle3", target, taps=None)
        taps = yaml.safe_load(re.search(r"drafter\.taps=(\[.*\]);", str(error.value))[1])
        drafter = make_drafter("eagle3", target, taps=taps)
        accepting = formats.accepting("eagle3", drafter.settings, target)
        assert "vllm" in accepting
        assert ("sglang" in accepting) is (layers > 2)


def test_a_vocabulary_in_further_weights_is_found_without_weights(
    tiny_target, make_drafter, tmp_path, monkeypatch
):
    monkeypatch.setattr("drafters.models.lm.check_vocabulary", lambda *_: None)
    target = tiny_target(vocab=V, layers=2, hidden=16, dtype=torch.float32)
    config = GPT2Config(vocab_size=V + 3, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "draft")
    drafter = make_drafter("lm", target, path=str(tmp_path / "draft"), lora={"r": 2, "alpha": 4})
    assert formats.accepting("lm", drafter.settings, target) == ["vllm", "sglang", "hf"]
    monkeypatch.setattr("drafters.export.hf_model._resized", lambda *_: {})
    assert formats.accepting("lm", drafter.settings, target) == ["hf"]
    with pytest.raises(UserError, match=r"more than an embedding and a head.*; set to=hf or native"):
        formats.check("lm", drafter.settings, target, "vllm")
