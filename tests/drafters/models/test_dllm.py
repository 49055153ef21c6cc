"""Masked diffusion models as drafters: passes, padding, windows, mask tokens, files and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import contract
import pytest
import torch
from drafter_checks import (
    CHAIN,
    CHUNKS,
    ROUNDING,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    batch_of,
    paths,
    random_texts,
    unrolled,
)
from fillers import CAUSAL, KINDS, LORA, MASK, adapted, count_passes, drafter_for, filler
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from workbench import Bench, make_target, make_tokenizer, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoint_io
from drafters.hf.masked_lm import MaskedModel, check_fills_masks
from drafters.hf.vocabulary import PADDING


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)


def refused(target, path: str, **options) -> str:
    with pytest.raises(UserError) as error:
        drafter_for(target, path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def both_ways(folder: str, kind: str):
    """The folder's model, bidirectional by transformers' own switch."""
    door = AutoModelForCausalLM if kind in CAUSAL else AutoModelForMaskedLM
    kernel = {"attn_implementation": "eager"} if kind in CAUSAL else {}
    model = door.from_pretrained(folder, **kernel).eval()
    if kind in CAUSAL:
        model.config.is_causal = False
    return model


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", [k for k in KINDS if "window" not in k])  # the switch keeps windows
@torch.no_grad()
def test_probs_are_those_of_one_plain_pass(target, tmp_path, kind, shift):
    """Without padding, and not by our mask: both directions, the shift, and what an anchor is shown."""
    folder = filler(tmp_path / "model", kind)
    drafter, plain = drafter_for(target, folder, shift=shift), both_ways(folder, kind)
    texts = random_texts(length=12)
    probs, compared = unrolled(drafter, target, texts), 0
    for row in range(2):
        for t in range(10):
            shown = [*texts[row, : t + 2].tolist(), *[MASK] * K]
            rows = plain(input_ids=torch.tensor([shown])).logits[0].softmax(-1)
            for depth in range(1, min(K, 10 - t) + 1):
                want = rows[t + 1 + depth - shift]
                torch.testing.assert_close(probs[(row, t, depth)], want, rtol=0, atol=ROUNDING)
                compared += 1
    assert compared == len(probs) == 2 * (10 * K - 3)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ci("llama-0", "llama-1", "bert-0", "learned positions-1")
def test_every_kind_of_model_keeps_the_contract(target, tmp_path, monkeypatch, kind, shift):
    pair = target, drafter_for(target, filler(tmp_path / "model", kind), shift=shift)
    contract.test_decoding_computes_the_probs_of_training(pair)
    contract.test_a_row_does_not_depend_on_its_neighbours(pair)
    contract.test_a_text_may_come_in_any_pieces(pair)
    contract.test_an_anchor_knows_tokens_up_to_its_depth_and_taps_up_to_itself(pair)
    contract.test_every_level_of_a_tree_computes_the_probs_of_training(pair, monkeypatch)
    contract.test_anchors_depths_and_teacher_rows_are_where_the_conventions_say(pair, "turns")


@pytest.mark.parametrize("depth", [2, 5, 8])
@pytest.mark.ci("5")
def test_draft_costs_one_pass_at_any_depth(target, tmp_path, depth):
    drafter = drafter_for(target, filler(tmp_path / "model"), depth=depth)
    widths = count_passes(drafter)
    for plan in (Plan(depth), Plan(depth, 3, 2 * depth), Plan(depth, proposal="sampled"), Plan(1)):
        widths.clear()
        options = {"max_new_tokens": 14, "sampler": Sampler(1.0), "plan": plan}
        (output,) = generate(target, drafter, [[7, 8, 9]], **options).outputs
        assert len(widths) == len(output.emitted) > 0
        assert widths[0] == 4 + depth  # the prompt, its root and all masks, even for a plan of one level
        assert widths == sorted(widths)


def filled(drafter, prefix: list[int]) -> list[int]:
    """The chain of several passes, one mask after the other and row by row."""
    window = drafter.masked.window(torch.tensor([prefix]), [len(prefix)])
    chain, left = [-1] * K, drafter.steps
    while -1 in chain:
        rows = drafter.masked.head(drafter.masked.read(window))[0].softmax(-1)
        rows[:, MASK] = 0
        empty = [i for i in range(K) if chain[i] == -1]
        share = -(-len(empty) // left)
        for i in sorted(empty, key=lambda i: -float(rows[i].max()))[:share]:
            chain[i] = int(rows[i].argmax())
            window.tokens[0, len(prefix) + i] = chain[i]
        left -= 1
    return chain


@pytest.mark.parametrize("steps", [2, 3])
@torch.no_grad()
def test_surest_masks_are_filled_first(target, tmp_path, steps):
    folder = filler(tmp_path / "model", spread=5.0)
    drafter, once = drafter_for(target, folder, steps=steps), drafter_for(target, folder)
    texts = random_texts()
    follower, other = Follower(drafter, target, texts), Follower(once, target, texts)
    widths, differ = count_passes(drafter), 0
    for counts in CHUNKS:
        follower.advance(counts)
        other.advance(counts)
        widths.clear()
        draft = follower.propose(CHAIN)
        assert len(widths) == steps
        for row, end in enumerate(follower.settled):
            chain = draft.tokens[row].tolist()
            assert chain == filled(drafter, texts[row, : end + 1].tolist())
            differ += chain != other.propose(CHAIN).tokens[row].tolist()
        tree = follower.propose(Plan(tree=((0,), (1,), (0, 0), (0, 0, 0))))
        assert all(tuple(draft.tokens[row].tolist()) in paths(tree, row) for row in range(2))
    assert differ, "later passes changed nothing, so this could not fail"


def test_no_mask_is_filled_with_the_mask_token(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model", "bert"), steps=3)
    drafter.model.cls.predictions.decoder.bias.data[MASK] = 100.0
    follower = Follower(drafter, target, random_texts())
    for counts in CHUNKS[:3]:
        follower.advance(counts)
        for plan in (CHAIN, TREE):
            assert (follower.propose(plan).tokens != MASK).all()


def test_dropout_is_off_in_training(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model", "bert", hidden_dropout_prob=0.5)).train()
    assert drafter.training
    assert not any(module.training for module in drafter.model.modules())
    batch = batch_of(target, random_texts())
    once, again = (next(drafter.unroll(batch, target)).hidden for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_train_and_loading_merges_them(target, tmp_path, kind):
    drafter = adapted(target, tmp_path / "model", kind)
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in drafter.named_parameters() if "lora_" in name}
    assert trained
    contract.test_gradients_reach_every_trainable_weight_and_none_of_the_targets((target, drafter))
    contract.test_decoding_computes_the_probs_of_training((target, drafter.eval()))
    (tmp_path / "saved").mkdir()
    checkpoint_io.save(drafter, target, tmp_path / "saved")
    assert weights(tmp_path / "saved").keys() == trained
    loaded = checkpoint_io.load(tmp_path / "saved", target)
    assert not [name for name, _ in loaded.named_parameters() if "lora_" in name]
    texts = random_texts()
    window = drafter.masked.window(texts, [24, 11])
    with torch.no_grad():
        rows = [d.masked.head(d.masked.read(window)) for d in (drafter, loaded)]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_saved_and_loaded_bit_for_bit(target, tmp_path, kind):
    drafter = drafter_for(target, filler(tmp_path / "model", kind), shift=1, steps=2)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "saved").mkdir()
    contract.test_a_saved_drafter_comes_back_bit_for_bit((target, drafter), tmp_path / "saved")


def test_loaded_in_the_targets_dtype(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    checkpoint_io.save(drafter, target, tmp_path)
    target.model.bfloat16()
    loaded = checkpoint_io.load(tmp_path, target)
    assert {w.dtype for w in loaded.parameters()} == {torch.bfloat16}
    assert loaded.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    follower = Follower(loaded, target, random_texts(), (6, 4))
    assert follower.propose(SAMPLED).q.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "learned positions", "bert", "roberta"])
@torch.no_grad()
def test_long_text_is_cut_to_the_context(target, tmp_path, kind):
    more = {"n_positions": 12} if kind == "learned positions" else {}
    drafter = drafter_for(target, filler(tmp_path / "model", kind, max_position_embeddings=12, **more))
    room = 7 if kind == "roberta" else 9  # whose first two places are those of padding
    assert drafter.masked.room == room
    texts = random_texts()
    probs = unrolled(drafter, target, texts)
    for t in range(20):
        newest = texts[:1, max(0, t + 2 - room) : t + 2]
        window = drafter.masked.window(newest, [newest.shape[1]])
        rows = drafter.masked.head(drafter.masked.read(window)).softmax(-1)[0]
        for depth in range(1, K + 1):
            torch.testing.assert_close(probs[(0, t, depth)], rows[depth - 1], rtol=0, atol=ROUNDING)
    contract.test_decoding_computes_the_probs_of_training((target, drafter))


def test_context_without_room_for_text_is_refused(target, tmp_path):
    said = refused(target, filler(tmp_path / "model", max_position_embeddings=12), depth=12)
    assert "set drafter.depth=11 or less" in said


@pytest.mark.parametrize(("vocab", "mask"), [(V + 9, V + 8), (V + 9, 3), (V - 9, 3)])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_head_of_another_size_is_cut_or_padded(target, tmp_path, kind, vocab, mask):
    folder = filler(tmp_path / "model", kind, vocab=vocab)
    drafter = drafter_for(target, folder, mask_token=mask)
    texts = random_texts()  # ids the model has not are among them
    follower = Follower(drafter, target, texts, (5, 3))
    q = follower.propose(SAMPLED).q
    torch.testing.assert_close(q.sum(-1), torch.ones(2, K))
    assert not q[..., vocab:].any()
    for one in (drafter, drafter_for(target, folder, mask_token=mask, steps=2)):
        follower = Follower(one, target, texts, (5, 3))
        assert follower.propose(CHAIN).tokens.max() < min(vocab, V)
    contract.test_decoding_computes_the_probs_of_training((target, drafter))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> tuple:
    """A target with a tokenizer, and a folder of its vocabulary that names a mask."""
    root = tmp_path_factory.mktemp("chat")
    target = load_target(str(make_target(root / "target")))
    folder = Path(filler(root / "model", "bert", vocab=264, max_position_embeddings=256))
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.save_pretrained(folder)
    return target, folder


def test_mask_token_is_the_given_one_or_the_folders(chat, tmp_path):
    target, folder = chat

    def mask(path, given):
        return drafter_for(target, str(path), mask_token=given).settings["mask_token"]

    assert [mask(folder, given) for given in (None, 7, 0, "<|pad|>")] == [260, 7, 0, 0]
    bare = shutil.copytree(folder, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"mask_token_id": 9}))
    assert [mask(bare, given) for given in (None, 7)] == [9, 7]


def test_missing_mask_token_is_refused(chat, tmp_path):
    target, folder = chat
    said = refused(target, filler(tmp_path / "bare", "bert", vocab=264), mask_token=None)
    assert "set drafter.mask_token" in said
    maskless = shutil.copytree(tmp_path / "bare", tmp_path / "maskless")
    make_tokenizer().save_pretrained(maskless)  # the folder's own would be made up: BERT's special tokens
    assert "names a mask token" in refused(target, str(maskless), mask_token=None)
    assert "has no token '<mask>'" in refused(target, str(folder), mask_token="<mask>")
    assert "has no token '[MASK]'" in refused(target, str(tmp_path / "bare"), mask_token="[MASK]")
    for number in (264, -1):
        assert f"drafter.mask_token={number}" in refused(target, str(folder), mask_token=number)


def test_unusable_model_is_refused(target, tmp_path):
    assert "drafter.path: give the folder or hub id" in refused(target, "")
    assert "no such folder" in refused(target, str(tmp_path / "nowhere"))
    wide = filler(tmp_path / "wide", "bert", vocab=V + PADDING + 1)
    assert f"has {V + PADDING + 1} ids, the target's {V}" in refused(target, wide)
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    assert "a 't5' model is no masked or causal language model" in refused(target, str(tmp_path / "t5"))
    (tmp_path / "gone").mkdir()
    shutil.copy(Path(wide) / "config.json", tmp_path / "gone")
    assert "drafter.path=" in refused(target, str(tmp_path / "gone"))


def test_code_of_a_model_folder_is_not_run(target, tmp_path):
    """Dream's and LLaDA's folders are like this one."""
    folder = Path(filler(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "Dream", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('it ran')\n")
    assert str(folder) in refused(target, str(folder))


def test_adapters_that_do_not_train_are_refused(target, tmp_path):
    said = refused(target, filler(tmp_path / "model"), lora=LORA, train=False)
    assert "leave drafter.train=true" in said


def test_class_that_cannot_fill_masks_is_refused(target, tmp_path, monkeypatch):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    masked, inputs = drafter.masked, MaskedModel.inputs

    def wrong(**changes):
        monkeypatch.setattr(MaskedModel, "inputs", lambda self, window: inputs(self, window) | changes)
        with pytest.raises(UserError) as error:
            check_fills_masks(masked, "here")
        monkeypatch.setattr(MaskedModel, "inputs", inputs)
        return str(error.value)

    assert "drafter.path=here: LlamaForCausalLM cannot fill in masks" in wrong(attention_mask=None)
    assert "attends only to earlier tokens" in wrong(attention_mask=None)
    assert "reads padding" in wrong(attention_mask=torch.zeros(2, 1, 9, 9))
    assert "raised" in wrong(position_ids="x")
    masked.head = replace(masked.head, scale=0.5)
    assert "more to its logits than its head" in wrong()
    check_fills_masks(drafter.masked, "here")


@pytest.fixture(scope="module")
def bench(tmp_path_factory, chat) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("dllm"))
    shutil.copytree(chat[1], bench.root / "model")
    return bench


@pytest.mark.proof
def test_run_trains_and_scores(bench):
    options = ["drafter=hf_dllm", f"drafter.path={bench.root / 'model'}", "drafter.anchors=3"]
    done = bench.train(*options, "weights=dpace", "decode=dynamic", "decode.depth=2").succeeded()
    assert done.err == ""
    card = json.loads((done.folder / "checkpoints" / "6" / "score.json").read_text())
    assert card["audit_passed"] is card["replay_agrees"] is True
