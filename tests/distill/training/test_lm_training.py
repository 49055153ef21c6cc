"""Training an independent draft model: cut from the target, adapted, over whose vocabulary."""

from __future__ import annotations

import json

import contract
import pytest
import torch
from draft_models import KINDS, adapted, draft_model, logits, quick
from drafter_checks import V, batch_of, random_texts, unrolled
from transformers import AutoConfig, AutoModelForCausalLM
from workbench import leftovers, same, train, weights

from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.load import load_model
from decode.model.target import Target
from distill.losses import divergences
from distill.losses.objective import Objective
from distill.losses.weights import DPace, Streak, constant, decay
from drafters.checkpoint import io as checkpoint_io
from drafters.hf.build import cut_target, spaced_layers
from drafters.models.lm import DraftLM


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)


# -- cut from the target -------------------------------------------------------------------------


def test_layers_are_kept_evenly_with_the_first_and_the_last():
    kept = [spaced_layers(*counts) for counts in ((12, 2), (12, 3), (5, 5), (4, 1), (1, 1))]
    assert kept == [[0, 11], [0, 6, 11], [0, 1, 2, 3, 4], [0], [0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cut_that_keeps_every_layer_is_the_target(tiny_target, dtype):
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=dtype)
    drafter = DraftLM.for_target(target, layers=3)
    assert drafter.trains
    assert {w.dtype for w in drafter.parameters()} == {torch.promote_types(dtype, torch.float32)}
    assert same(drafter.to(dtype).model.state_dict(), target.model.state_dict())
    contract.test_the_target_is_no_part_of_the_drafter((target, drafter))


@torch.no_grad()
def test_cut_is_the_target_without_the_layers_between(target):
    texts, base = random_texts(), target.base
    want = target.model.get_input_embeddings()(texts)
    angles = base.rotary_emb(want, torch.arange(texts.shape[1])[None])
    for i in (0, 3):
        want = base.layers[i](want, position_embeddings=angles)
    want = target.head(base.norm(want))
    torch.testing.assert_close(logits(cut_target(target, 2), texts), want, rtol=0, atol=1e-5)


MIXED = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_cut(kind):
    name, shape = KINDS[kind]
    more = MIXED if "windows and" in kind else {}
    key = "n_layer" if name == "gpt2" else "num_hidden_layers"
    config = AutoConfig.for_model(name, vocab_size=V, **shape | {key: 3, "num_hidden_layers": 3} | more)
    target = Target(AutoModelForCausalLM.from_config(config))
    model = cut_target(target, 2)
    lm = CausalLM(model)
    assert len(lm.layers) == 2
    if more:
        assert model.config.layer_types == ["full_attention", "sliding_attention"]
    last = next(iter(lm.layers[1].parameters())), next(iter(target.layers[2].parameters()))
    assert torch.equal(*last)
    if kind == "tied":
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_cannot_be_cut_is_refused(target, monkeypatch):
    with pytest.raises(UserError, match=r"drafter\.layers=5: the target has 4"):
        DraftLM.for_target(target, layers=5)
    monkeypatch.setattr(type(target.model), "__module__", "elsewhere.code")
    with pytest.raises(UserError, match=r"a LlamaForCausalLM cannot be cut; set drafter\.path"):
        DraftLM.for_target(target)


# -- low-rank adapters ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_train_and_gradients_reach_them(target, tmp_path, kind):
    drafter = adapted(target, tmp_path / "draft", kind)
    trained = {name: weight.requires_grad for name, weight in drafter.named_parameters()}
    assert trained == {name: "lora_" in name for name in trained}
    contract.test_gradients_reach_every_trainable_weight_and_none_of_the_targets((target, drafter))


def test_contract_holds_with_adapters_where_the_yaml_puts_them(target, tmp_path):
    pair = target, adapted(target, tmp_path / "draft", targets=["q_proj"])
    assert {n.split(".")[-4] for n, w in pair[1].named_parameters() if w.requires_grad} == {"q_proj"}
    contract.test_decoding_computes_the_probs_of_training(pair)
    contract.test_anchors_depths_and_teacher_rows_are_where_the_conventions_say(pair, "turns")


# -- weights, dtype, vocabulary --------------------------------------------------------------------


def test_weights_train_in_fp32_whatever_the_folder_has(target, tmp_path):
    path = draft_model(tmp_path / "draft")
    load_model(path).bfloat16().save_pretrained(path)
    drafter = DraftLM.for_target(target, path=path)
    assert drafter.trains
    assert {w.dtype for w in drafter.parameters()} == {torch.float32}
    given = DraftLM.for_target(target, path=path, train=False)
    assert not given.trains
    assert {w.dtype for w in given.parameters()} == {torch.bfloat16}
    # A step too small for bf16 is still there after a save.
    drafter.model.lm_head.weight.data += 1e-5
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert torch.equal(loaded.model.lm_head.weight, drafter.model.lm_head.weight)


def test_rows_past_the_context_are_not_taught_and_dropout_is_off(target, tmp_path):
    path = draft_model(tmp_path / "draft", "learned positions", n_positions=16)
    drafter, batch = DraftLM.for_target(target, path=path).train(), batch_of(target, random_texts(length=24))
    assert any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in drafter.modules())
    (step,), (again,) = (drafter.unroll(batch, target) for _ in range(2))
    assert sorted(step.anchor.tolist()) == [row * 24 + t for row in range(2) for t in range(15)]
    assert torch.equal(step.hidden, again.hidden)


@pytest.mark.parametrize("vocab", [V - 9, V, V + 9])
def test_loss_and_decoder_have_the_same_vocabulary(target, tmp_path, vocab):
    drafter = DraftLM.for_target(target, path=draft_model(tmp_path / "draft", vocab=vocab)).eval()
    texts = random_texts()
    (step,) = drafter.unroll(batch_of(target, texts), target)
    known = min(vocab, V)
    assert len(step.head.weight) == known
    assert (step.head.d2t is None) == (vocab >= V)
    state = drafter.new_state(1)
    at = step.anchor.tolist().index(9)
    read = texts[:1, :10], torch.empty(1, 10, 0, 16), [10], texts[0, 10:11]
    with torch.no_grad():
        drafter.advance(state, target, *read)
        taught = step.head(step.hidden[at]).softmax(-1)
    torch.testing.assert_close(state.logits[0].softmax(-1)[:known], taught, rtol=0, atol=1e-5)
    loss, (scored,) = Objective(divergences.kl, constant)(
        [step], target.read(texts).last, target.head, {}, tokens=texts
    )
    rows = target.head(target.read(texts).last).softmax(-1).flatten(0, 1)[step.anchor + 1]
    alpha = torch.minimum(rows[:, :known], step.head(step.hidden).softmax(-1)).sum()
    assert scored.alpha == pytest.approx(alpha.item(), rel=1e-4)
    loss.backward()
    grad = drafter.model.get_output_embeddings().weight.grad
    assert grad.isfinite().all()
    assert grad[:known].abs().max() > 0


def test_all_depths_are_one_row_and_weights_that_read_several_are_refused(target):
    drafter = DraftLM.for_target(target)
    steps = list(drafter.unroll(batch_of(target, random_texts()), target))
    assert [step.depth for step in steps] == [1]
    assert len(unrolled(drafter, target, random_texts())) > len(steps[0].anchor)
    for wrong in (Streak(0.0, 0.0), DPace(0.5, 0.0)):
        with pytest.raises(UserError, match="set weights=constant"):
            Objective(divergences.kl, wrong).check(drafter)
    Objective(divergences.kl, lambda depth: decay(depth, 0.8)).check(drafter)


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [[], ["drafter.lora={r: 2, alpha: 4}", "objective=nll"], ["on_policy.share=0.5", "objective=lk"]],
    ids=["cut", "lora, nll", "on policy"],
)
@pytest.mark.ci("on policy")
def test_run_trains_saves_and_scores(bench, more):
    done = train(quick(bench, "drafter.layers=1", *more)).succeeded()
    card = json.loads((done.folder / "checkpoints" / "last" / "score.json").read_text())
    assert card["audit_passed"]
    assert card["step"] == 6
    assert not leftovers(bench.root)
    first, last = (weights(done.folder / "checkpoints" / step) for step in ("3", "6"))
    assert not any(torch.equal(first[name], last[name]) for name in first)
    assert all(("lora" in name) is ("lora" in " ".join(more)) for name in first)
