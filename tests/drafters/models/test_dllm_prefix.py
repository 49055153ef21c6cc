"""Masked diffusion models with a kept prefix: the contract, the mask, packed training, passes, files."""

from __future__ import annotations

import json

import contract
import pytest
import torch
from contract import *  # noqa: F403
from drafter_checks import (
    CHAIN,
    CHUNKS,
    ROUNDING,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    alike,
    batch_of,
    both,
    random_texts,
    unrolled,
)
from fillers import CAUSAL, MASK, adapted, count_passes, drafter_for, filler
from transformers import AutoModelForCausalLM

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.causal_lm import CausalLM
from decode.sampling import Sampler
from distill.losses import divergences
from distill.losses.objective import Objective
from distill.losses.weights import DPace, constant
from drafters import optional
from drafters.base import DraftStep
from drafters.checkpoint import io as checkpoint_io

# Too coarse for central differences; gradients are compared with those of plain passes below.
del test_the_gradient_of_training_is_the_derivative_of_its_loss  # noqa: F821

W = 4  # the window of "windows and soft caps"


@pytest.fixture(params=[0, 1], ids=["at the mask", "before the mask"])
def pair(request, tiny_target, make_drafter):
    """A target and a drafter that keeps its text, for the contract every drafter keeps."""
    return both(tiny_target, make_drafter, "hf_dllm", prefix="causal", shift=request.param)


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)


def full_pass(model, shown, block, shift, kind="llama"):
    """(K, V) logits of the tokens that a text goes on with, the mask written out; `block`: the masks."""
    text, size = len(shown), len(shown) + len(block)

    def bias(window=size):
        sees = [[(j <= i if i < text else True) and i - j < window for j in range(size)] for i in range(size)]
        return torch.zeros(1, 1, size, size).masked_fill(~torch.tensor(sees), torch.finfo(torch.float32).min)

    windows = {"full_attention": bias(), "sliding_attention": bias(W)}
    rows = model(
        input_ids=torch.tensor([[*shown, *block]]),
        attention_mask=windows if "window" in kind else bias(),
        position_ids=torch.arange(size)[None],
        use_cache=False,
    ).logits[0]
    return rows[text - shift : size - shift]


def plain_model(folder, kind="llama"):
    kernel = {"attn_implementation": "eager"} if "window" in kind else {}
    return AutoModelForCausalLM.from_pretrained(folder, **kernel).eval()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", CAUSAL)
@torch.no_grad()
def test_probs_are_those_of_one_full_pass_under_the_mask(target, tmp_path, kind, shift):
    """In training, and in decoding, in any pieces of the text and next to a row of any length."""
    folder = filler(tmp_path / "model", kind)
    drafter, plain = drafter_for(target, folder, shift=shift, prefix="causal"), plain_model(folder, kind)
    texts = random_texts()
    probs = unrolled(drafter, target, texts)
    # Frozen, a Llama drafts by the fused pass; the contract's cases draft by transformers' code.
    follower = Follower(drafter.requires_grad_(False), target, texts)
    for counts in CHUNKS:
        follower.advance(counts)
        q = follower.propose(SAMPLED).q
        for row, (shown, anchor) in enumerate(zip(follower.known, follower.anchors, strict=True)):
            want = full_pass(plain, shown, [MASK] * K, shift, kind).softmax(-1)
            taught = torch.stack([probs[row, anchor, depth] for depth in range(1, K + 1)])
            for found in (q[row], taught):
                torch.testing.assert_close(found, want, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("kind", ["llama", "windows and soft caps"])
def test_prompt_may_be_read_in_chunks(target, tmp_path, monkeypatch, kind):
    drafter = drafter_for(target, filler(tmp_path / "model", kind), shift=1, prefix="causal")
    texts, drafts = random_texts(), []
    for chunk in (CausalLM.chunk, 5):
        monkeypatch.setattr(CausalLM, "chunk", chunk)
        follower = Follower(drafter, target, texts, (18, 4))
        drafts.append([follower.propose(SAMPLED)])
        follower.advance((2, 7))
        drafts[-1].append(follower.propose(SAMPLED))
    for once, pieces in zip(*drafts, strict=True):
        assert all(alike(once, row, pieces, row) for row in range(2))


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.ci("windows and soft caps")
def test_adapters_keep_the_contract(target, tmp_path, kind):
    pair = target, adapted(target, tmp_path / "model", kind, shift=1, prefix="causal")
    contract.test_gradients_reach_every_trainable_weight_and_none_of_the_targets(pair)
    contract.test_decoding_computes_the_probs_of_training((target, pair[1].eval()))
    contract.test_proposing_changes_nothing_for_later_rounds(pair)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sampled", [False, True], ids=["all anchors", "a sample"])
@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.ci("llama-all anchors-0", "llama-a sample-1", "windows and soft caps-a sample-0")
def test_packed_pass_is_a_window_for_each_anchor(target, tmp_path, kind, sampled, shift):
    """Losses and gradients; a sample leaves texts with more blocks and fewer."""
    folder = filler(tmp_path / "model", kind)
    drafter = drafter_for(target, folder, shift=shift, prefix="causal").train(sampled)
    plain = plain_model(folder, kind).float()
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 4:9] = False
    batch = batch_of(target, random_texts(3, 12), mask)._replace(seed=2)
    widths, steps = count_passes(drafter), list(drafter.unroll(batch, target))
    assert len(widths) == 1
    total, _ = Objective(divergences.kl, constant)(steps, batch.last, target.head, {})
    want, blocks = torch.zeros(()), [0, 0, 0]
    for anchor in steps[0].anchor.tolist():
        row, t = divmod(anchor, 12)
        blocks[row] += 1
        logs = full_pass(plain, batch.tokens[row, : t + 2].tolist(), [MASK] * K, shift, kind).log_softmax(-1)
        for step in steps:
            if anchor in step.anchor.tolist():
                p = target.head(batch.last[row, t + step.depth]).softmax(-1)
                want = want + step.weight * (p * (p.log() - logs[step.depth - 1])).sum()
    assert widths == [12 + K * max(blocks)]
    assert (min(blocks) < max(blocks)) or not sampled
    torch.testing.assert_close(total.detach(), want.detach(), rtol=1e-5, atol=1e-5)
    total.backward()
    want.backward()
    theirs = dict(plain.named_parameters())
    for name, weight in drafter.model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-4, atol=2e-4, msg=name)
        assert weight.grad.abs().max() > 0


@pytest.mark.parametrize("weights", [constant, DPace(0.5, 0.5)], ids=["constant", "dpace"])
def test_batch_past_the_context_has_gradients_of_zero(target, tmp_path, weights):
    """Other ranks wait for their gradients, which are 0."""
    drafter = drafter_for(target, filler(tmp_path / "model", max_position_embeddings=16), prefix="causal")
    mask = torch.zeros(2, 24, dtype=torch.bool)
    mask[:, 18:] = True
    batch = batch_of(target, random_texts(), mask)
    (step,) = drafter.train().unroll(batch, target)
    assert isinstance(step, DraftStep)
    assert (step.depth, len(step.anchor)) == (1, 0)
    total, _ = Objective(divergences.kl, weights)([step], batch.last, target.head, {})
    total.backward()
    layers = [w for name, w in drafter.model.named_parameters() if "layers" in name]
    assert all(w.grad is not None and not w.grad.any() for w in layers)


@pytest.mark.parametrize("steps", [1, 2])
def test_draft_reads_new_tokens_and_masks_only(target, tmp_path, steps):
    drafter = drafter_for(target, filler(tmp_path / "model"), prefix="causal", shift=1, steps=steps)
    widths = count_passes(drafter)
    for length in (3, 40):
        widths.clear()
        options = {"max_new_tokens": 14, "sampler": Sampler(0.0), "plan": CHAIN}
        (output,) = generate(target, drafter, [[*range(length)]], **options).outputs
        first, later = widths[::steps], [w for i, w in enumerate(widths) if i % steps]
        assert first == [length + 1 + K, *(n + K for n in output.emitted[:-1])]
        assert later == [K] * len(output.emitted) * (steps - 1)


@pytest.mark.parametrize("shift", [0, 1])
@torch.no_grad()
def test_surest_masks_are_filled_first(target, tmp_path, shift):
    folder = filler(tmp_path / "model", spread=5.0)
    drafter = drafter_for(target, folder, steps=3, shift=shift, prefix="causal")
    plain, follower, differ = plain_model(folder), Follower(drafter, target, random_texts()), 0
    for counts in CHUNKS:
        follower.advance(counts)
        for shown, chain in zip(follower.known, follower.propose(CHAIN).tokens.tolist(), strict=True):
            block, levels, empty = [MASK] * K, [0] * K, set(range(K))
            while empty:  # one mask in each pass
                rows = full_pass(plain, shown, block, shift).softmax(-1)
                rows[:, MASK] = 0
                surest = max(empty, key=lambda i: float(rows[i].max()))
                block[surest] = levels[surest] = int(rows[surest].argmax())
                empty.remove(surest)
            assert chain == levels
            once = full_pass(plain, shown, [MASK] * K, shift).argmax(-1).tolist()
            differ += chain != once
    assert differ, "later passes changed nothing, so this could not fail"


@pytest.mark.parametrize("kind", ["llama", "learned positions"])
def test_text_past_the_context_is_the_targets(target, tmp_path, kind):
    more = {"n_positions": 16} if kind == "learned positions" else {}
    folder = filler(tmp_path / "model", kind, max_position_embeddings=16, **more)
    drafter = drafter_for(target, folder, prefix="causal")
    anchors = {t for _, t, _ in unrolled(drafter, target, random_texts())}
    assert max(anchors) == 16 - K - 2  # whose root and masks are the model's last places
    prompts, options = [[1, 2, 3, 4, 5], [*range(20)]], {"max_new_tokens": 12, "sampler": Sampler(0.0)}
    plain = [o.tokens for o in generate(target, None, prompts, **options).outputs]
    for plan in (CHAIN, TREE):
        assert [o.tokens for o in generate(target, drafter, prompts, plan=plan, **options).outputs] == plain


@pytest.mark.parametrize("prefixes", [("none", "causal"), ("causal", "none")], ids=" to ".join)
def test_weights_start_the_other_prefix(target, tmp_path, prefixes):
    """The weights are the same; what they were trained for is not."""
    folder = filler(tmp_path / "model")
    first, second = (drafter_for(target, folder, prefix=prefix) for prefix in prefixes)
    for weight in first.parameters():
        torch.nn.init.normal_(weight)
    (tmp_path / "saved").mkdir()
    checkpoint_io.save(first, target, tmp_path / "saved")
    assert checkpoint_io.warm_start(second, tmp_path / "saved", target) == []
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert second.settings["prefix"] == prefixes[1]


def test_checkpoint_without_prefix_reads_the_whole_text(target, tmp_path):
    checkpoint_io.save(drafter_for(target, filler(tmp_path / "model")), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["settings"].pop("prefix") == "none"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not checkpoint_io.load(tmp_path, target).keeps_prefix


def test_model_whose_text_sees_masks_is_refused(target, tmp_path):
    with pytest.raises(UserError, match=r"BertForMaskedLM text sees the masks.*set drafter\.prefix=none"):
        drafter_for(target, filler(tmp_path / "model", "bert"), prefix="causal")


def test_keys_and_values_of_masks_are_not_kept(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"), prefix="causal")
    follower = Follower(drafter, target, random_texts())
    for counts in CHUNKS:
        follower.advance(counts)
        follower.propose(SAMPLED)
        assert list(follower.state.lm.lengths) == [n + 1 for n in follower.settled]
    layers, width, fp32 = 2, 16, 4
    assert optional.kv_bytes_per_token(drafter, follower.state) == layers * 2 * width * fp32
