"""Drafters over a reduced draft vocabulary: one law in training and decoding, fitted and saved."""

from __future__ import annotations

import pytest
import torch
from faces import (
    SAMPLED,
    TREE,
    Follower,
    V,
    assert_faces_agree,
    batch_of,
    both,
    paths,
    random_rollouts,
    random_texts,
)

from decode.errors import UserError
from decode.plan import Plan
from drafters.checkpoint import io as hub
from drafters.vocabulary import TokenCounts, draft_vocab_size

SIZE = 7
SHARED = {"own_head": False}
DRAFTERS = {
    "eagle": {},
    "hass": {},
    "prism": {},
    "lyanna": {"hot_tokens": V},
    "lyanna with fewer hot tokens": {"hot_tokens": 4},
    "medusa": {},
    "medusa of one head": SHARED | {"token_info": "gated", "info_rank": 4, "hot_tokens": 5},
    "hydra": {},
    "hydra of one head": SHARED,
    "mlp": {},
    "lstm": {},
    "diffusion": {},
    "diffusion with a bias": {"token_info": "recurrent", "info_rank": 4, "hot_tokens": 4},
    "dflash": {},
    "dflash in steps": {"steps": 2},
}


@pytest.fixture(params=DRAFTERS)
def reduced(request, tiny_target, make_drafter):
    """A target, and a drafter that proposes 7 of its tokens."""
    options = DRAFTERS[request.param] | {"draft_vocab_size": SIZE}
    return both(tiny_target, make_drafter, request.param.split()[0], **options)


def test_decoding_computes_the_laws_that_training_taught(reduced):
    target, drafter = reduced
    if "sampled" not in drafter.proposals:
        pytest.skip("has no law")
    q = assert_faces_agree(drafter, target, random_texts()).propose(SAMPLED).q
    outside = torch.ones(V, dtype=torch.bool)
    outside[drafter.d2t] = False
    assert q[..., outside].abs().max() == 0
    assert q.sum(-1) == pytest.approx(1.0)


def test_a_tree_has_tokens_of_the_vocabulary_alone(reduced):
    target, drafter = reduced
    follower = Follower(drafter, target, random_texts(), (6, 4))
    draft = follower.propose(TREE)
    for row in range(2):
        tokens = {token for path in paths(draft, row) for token in path}
        assert tokens
        assert tokens <= set(drafter.d2t.tolist())


def test_its_logits_are_those_rows_of_the_heads_and_training_has_all(reduced):
    target, drafter = reduced
    drafter.requires_grad_(True).train()
    (step, *_) = list(drafter.unroll(batch_of(target, random_texts()), target))
    logits = step.head(step.hidden)
    assert logits.shape == (len(step.hidden), V)
    logits.logsumexp(-1).sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    drafter.eval()
    (few, *_) = list(drafter.unroll(batch_of(target, random_texts()), target))
    if drafter.settings.get("feature_noise") or drafter.settings.get("anchors"):
        return  # other inputs
    torch.testing.assert_close(few.head(few.hidden), logits[:, drafter.d2t])


def test_a_checkpoint_keeps_its_vocabulary(reduced, tmp_path):
    target, drafter = reduced
    hub.save(drafter, target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert torch.equal(loaded.d2t, drafter.d2t)
    (one, other) = (
        Follower(each, target, random_texts(), (6, 4)).propose(TREE) for each in (drafter, loaded)
    )
    assert torch.equal(one.tokens, other.tokens)


def test_another_vocabulary_and_changed_weights_are_seen(reduced):
    """The rows of the target's head are copied once."""
    target, drafter = reduced
    follower = Follower(drafter, target, random_texts(), (6, 4))
    before = follower.propose(Plan(2)).tokens
    drafter.d2t.copy_((drafter.d2t + 1) % V)
    with torch.no_grad():
        after = follower.propose(Plan(2)).tokens
    assert set(after.flatten().tolist()) <= set(drafter.d2t.tolist())
    assert before.shape == after.shape


def test_end_tokens_come_first_and_hot_tokens_are_in_the_vocabulary(tiny_target, make_drafter, monkeypatch):
    target = tiny_target(vocab=V)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [V - 1])
    drafter = make_drafter("lyanna", target, hot_tokens=3, draft_vocab_size=5)
    said = drafter.fit(random_rollouts(V), target)
    counts = TokenCounts.of(random_rollouts(V), target)
    assert V - 1 in drafter.d2t.tolist()
    assert torch.equal(drafter.d2t, counts.most_frequent(5))
    assert torch.equal(drafter.d2t[drafter.info.rows], drafter.info.hot)
    assert said == f"5 {counts.share(drafter.d2t)}; 3 hot {counts.share(drafter.info.hot)}"


@pytest.mark.parametrize(
    ("setting", "vocab", "size"),
    [
        ("auto", 4096, None),
        ("auto", 49152, 12288),
        ("auto", 200000, 32000),
        (None, 4096, None),
        (4096, 4096, None),
        (10, 4096, 10),
    ],
)
def test_a_quarter_of_the_vocabulary_is_chosen(setting, vocab, size):
    assert draft_vocab_size(setting, vocab) == size


@pytest.mark.parametrize("setting", ["half", 0, -1, 0.5, True])
def test_other_sizes_are_refused(setting):
    with pytest.raises(UserError, match=r"draft_vocab_size=.*: give a number of tokens, auto or null"):
        draft_vocab_size(setting, 4096)


def test_a_drafter_without_a_vocabulary_is_not_fitted(tiny_target, make_drafter):
    target = tiny_target(vocab=V)
    drafter = make_drafter("eagle", target)
    assert not drafter.needs_fit
    assert drafter.output_head(target.head) is target.head
