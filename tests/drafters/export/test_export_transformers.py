"""Exports to transformers: its own classes load them, compute our logits, and draft as long as we say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_checks import batch_of
from engine_tests import exported, random_target
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MellumConfig,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from decode.errors import UserError
from drafters.export import formats

LENGTH, MASK = 10, 255
MELLUM = {"mlp_layer_types": ["dense"] * 3, "layer_types": ["full_attention"] * 3}


def text() -> torch.Tensor:
    return torch.randint(MASK, (1, LENGTH), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of(drafter, target, tokens) -> dict[tuple[int, int], torch.Tensor]:
    """(anchor, depth) -> (V,) logits, told the text."""
    target.tap(drafter.taps)
    found = {}
    for step in drafter.unroll(batch_of(target, tokens), target):
        rows = step.head(step.hidden)
        found |= {(int(anchor), step.depth): row for anchor, row in zip(step.anchor, rows, strict=True)}
    return found


@torch.no_grad()
def test_a_dflash_is_muse_glimmers_assistant(make_drafter, tmp_path):
    target = random_target(LlamaConfig, tmp_path / "target")
    drafter = make_drafter("dflash", target, taps=[2, 1], layers=2, mask_id=MASK)
    exported(drafter, target, "transformers", tmp_path / "draft")
    assistant = AutoModel.from_pretrained(tmp_path / "draft").eval()
    assert formats.served_length("dflash", drafter.settings, "transformers") == drafter.depth
    assert assistant.config.block_size == drafter.depth + 1
    tokens = text()
    states = target.model(tokens, output_hidden_states=True).hidden_states
    context = torch.cat([states[layer + 1] for layer in assistant.config.target_layer_ids], -1)
    for (anchor, depth), ours in logits_of(drafter, target, tokens).items():
        block = torch.tensor(
            [[int(tokens[0, anchor + 1]), *[assistant.config.mask_token_id] * drafter.depth]]
        )
        out = assistant(
            noise_embeds=target.model.get_input_embeddings()(block),
            context_hidden_states=context[:, : anchor + 1],
            position_ids=torch.arange(anchor + 1 + block.shape[1])[None],
        ).last_hidden_state
        theirs = target.model.get_output_embeddings()(out[0, depth])
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


@pytest.fixture
def mellum(tmp_path):
    return random_target(MellumConfig, tmp_path / "target", **MELLUM)


@torch.no_grad()
@pytest.mark.parametrize("hidden_first", [True, False])
def test_an_mtp_head_is_a_layer_of_the_targets(make_drafter, mellum, tmp_path, hidden_first):
    drafter = make_drafter("mtp", mellum, qk_norm=True, hidden_first=hidden_first)
    exported(drafter, mellum, "transformers", tmp_path / "draft")
    config = AutoConfig.from_pretrained(tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(mellum.model.name_or_path, config=config)
    model.config.name_or_path = str(tmp_path / "draft")
    head = MtpModel.from_pretrained(model)
    tokens = text()
    last = model(tokens, output_hidden_states=True).hidden_states[-1]
    ours = {at: row for at, row in logits_of(drafter, mellum, tokens).items() if at[1] == 1}
    assert ours
    for (anchor, _), row in ours.items():
        _, theirs, _ = head(
            tokens[:, 1 : anchor + 2],
            last[:, : anchor + 1],
            None,
            torch.arange(1, anchor + 2)[None],
            MtpCache(config=model.config.get_mtp_config()),
        )
        torch.testing.assert_close(theirs[0, -1], row, rtol=0, atol=1e-4)


def test_an_mtp_head_of_another_form_is_refused(make_drafter, mellum):
    plain, early = (
        make_drafter("mtp", mellum, **more) for more in ({}, {"before_norm": True, "qk_norm": True})
    )
    for drafter, said in ((plain, "drafter.qk_norm=true"), (early, "drafter.before_norm=false")):
        with pytest.raises(UserError, match=f"train with {said}"):
            formats.check("mtp", drafter.settings, mellum, "transformers")


def test_an_mtp_head_beside_another_class_is_refused(make_drafter, tmp_path):
    target = random_target(LlamaConfig, tmp_path / "target")
    drafter = make_drafter("mtp", target)
    with pytest.raises(UserError, match=r"only beside a Mellum, and the target is a 'llama'.*set to=vllm or"):
        formats.check("mtp", drafter.settings, target, "transformers")


def test_a_draft_model_says_how_long_drafts_are(make_drafter, tmp_path):
    target = random_target(LlamaConfig, tmp_path / "target")
    drafter = make_drafter("lm", target)
    exported(drafter, target, "transformers", tmp_path / "draft")
    written = GenerationConfig.from_pretrained(tmp_path / "draft")
    assert written.num_assistant_tokens == formats.served_length("lm", drafter.settings, "transformers")
    assert written.num_assistant_tokens_schedule == "constant"
    assert written.assistant_confidence_threshold == 0.0
    assert target.model.generation_config.num_assistant_tokens is None  # the target's is as it was
    assert Path(tmp_path / "draft" / "model.safetensors").is_file()
