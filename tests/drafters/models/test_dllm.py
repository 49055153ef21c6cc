"""A diffusion drafter: both directions, the shift, padding, passes counted, windows, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import contract
import pytest
import torch
from faces import (
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
from workbench import Bench, final, leftovers, make_target, make_tokenizer, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.losses import divergences
from distill.losses.objective import Objective
from distill.losses.weights import Streak, constant
from drafters.checkpoint import io as hub
from drafters.families.hf_model import PADDING
from drafters.families.masked_lm import MaskedModel, check_fills_masks

DRAWN = Plan(K, 3, 8, proposal="hybrid")


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)


def refused(target, path: str, **options) -> str:
    with pytest.raises(UserError) as error:
        drafter_for(target, path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# -- one pass, as transformers would make it -----------------------------------------------------


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
def test_every_law_is_that_of_one_plain_pass(target, tmp_path, kind, shift):
    """Without padding, and not by our mask: both directions, the shift, and what an anchor is shown."""
    folder = filler(tmp_path / "model", kind)
    drafter, plain = drafter_for(target, folder, shift=shift), both_ways(folder, kind)
    texts = random_texts(length=12)
    laws, compared = unrolled(drafter, target, texts), 0
    for row in range(2):
        for t in range(10):
            shown = [*texts[row, : t + 2].tolist(), *[MASK] * K]
            rows = plain(input_ids=torch.tensor([shown])).logits[0].softmax(-1)
            for depth in range(1, min(K, 10 - t) + 1):
                want = rows[t + 1 + depth - shift]
                torch.testing.assert_close(laws[(row, t, depth)], want, rtol=0, atol=ROUNDING)
                compared += 1
    assert compared == len(laws) == 2 * (10 * K - 3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_place_reads_every_other_and_no_padding(target, tmp_path, kind):
    masked = drafter_for(target, filler(tmp_path / "model", kind)).masked
    window = masked.window(random_texts(length=6), [6, 4])
    assert window.seen.tolist() == [[True] * 9, [True] * 7 + [False] * 2]
    assert window.masks.tolist() == [[6, 7, 8], [4, 5, 6]]
    places = torch.arange(9).expand(2, -1)
    before = masked.forward(window, places)
    for row, size in enumerate((9, 7)):
        for i in range(9):
            other = window.tokens.clone()
            other[row, i] = (other[row, i] + 1) % V
            moved = (
                (masked.forward(window._replace(tokens=other), places) - before).abs().amax(-1)[row, :size]
            )
            assert (moved > 1e-4).all() if i < size else not moved.any()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ci("llama-0", "llama-1", "bert-0", "learned positions-1")
def test_the_contract_holds_for_every_kind_of_model(target, tmp_path, monkeypatch, kind, shift):
    pair = target, drafter_for(target, filler(tmp_path / "model", kind), shift=shift)
    contract.test_decoding_computes_the_laws_that_training_taught(pair)
    contract.test_a_row_does_not_depend_on_its_neighbours(pair)
    contract.test_a_text_may_come_in_any_pieces(pair)
    contract.test_an_anchor_knows_tokens_up_to_its_depth_and_taps_up_to_itself(pair)
    contract.test_every_level_of_a_tree_computes_the_laws_that_training_taught(pair, monkeypatch)
    contract.test_anchors_depths_and_teacher_rows_are_where_the_conventions_say(pair, "turns")


def test_a_tree_is_the_product_of_the_depths(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    follower = Follower(drafter, target, random_texts(), (6, 4))
    logs = follower.propose(SAMPLED).q.log()  # (B, K, V)
    draft = follower.propose(TREE)
    for row in range(2):
        for path in set(paths(draft, row)) - {()}:
            assert path[-1] in logs[row, len(path) - 1].topk(TREE.width).indices


# -- passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 5, 8])
@pytest.mark.ci("5")
def test_a_draft_costs_one_pass_however_deep(target, tmp_path, depth):
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
    chain, levels, left = [-1] * K, [None] * K, drafter.steps
    while -1 in chain:
        rows = drafter.masked.head(drafter.masked.read(window))[0].softmax(-1)
        rows[:, MASK] = 0
        empty = [i for i in range(K) if chain[i] == -1]
        for i in empty:
            levels[i] = rows[i]
        share = -(-len(empty) // left)
        for i in sorted(empty, key=lambda i: -float(rows[i].max()))[:share]:
            chain[i] = int(rows[i].argmax())
            window.tokens[0, len(prefix) + i] = chain[i]
        left -= 1
    return chain


@pytest.mark.parametrize("steps", [2, 3])
@torch.no_grad()
def test_with_more_passes_the_surest_masks_are_filled_first(target, tmp_path, steps):
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


def test_no_mask_is_filled_with_a_mask(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model", "bert"), steps=3)
    drafter.model.cls.predictions.decoder.bias.data[MASK] = 100.0
    follower = Follower(drafter, target, random_texts())
    for counts in CHUNKS[:3]:
        follower.advance(counts)
        for plan in (CHAIN, TREE):
            assert (follower.propose(plan).tokens != MASK).all()


@pytest.mark.parametrize("plan", [SAMPLED, DRAWN], ids=lambda p: p.name)
def test_tokens_drawn_in_several_passes_are_refused(target, tmp_path, plan):
    drafter = drafter_for(target, filler(tmp_path / "model"), steps=2)
    assert drafter.traits.proposals == ("fixed",)
    drafter.check(CHAIN)
    drafter.check(TREE)
    with pytest.raises(UserError, match=r"drafter\.steps=2 .* not be lossless.*set decode\.proposal=fixed"):
        drafter.check(plan)
    with pytest.raises(UserError, match=r"not be lossless"):
        generate(target, drafter, [[7, 8]], max_new_tokens=4, sampler=Sampler(1.0), plan=plan)
    drafter_for(target, filler(tmp_path / "other")).check(plan)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_output_is_the_targets_own(target, tmp_path, steps):
    drafter = drafter_for(target, filler(tmp_path / "model", "bert"), steps=steps)
    prompts = [[7, 8, 9, 10, 11], [12], [20, 30]]
    options = {"max_new_tokens": 15, "sampler": Sampler(0.0)}
    plain = [o.tokens for o in generate(target, None, prompts, **options).outputs]
    for plan in (CHAIN, TREE):
        run = generate(target, drafter, prompts, plan=plan, **options)
        assert [o.tokens for o in run.outputs] == plain


# -- what training takes ---------------------------------------------------------------------------


@pytest.mark.proof
def test_training_takes_a_sample_that_stands_for_all(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[1, :12] = False
    batch = batch_of(target, random_texts(3), mask)
    everyone = [int(a) for a in next(drafter.unroll(batch, target)).anchor]
    widths, drawn = count_passes(drafter.train()), torch.zeros(3 * 24)
    for seed in range(300):
        steps = list(drafter.unroll(batch._replace(seed=seed), target))
        first = steps[0]
        assert len(first.anchor) == len(first.hidden) == 3 * 2  # `anchors` of each row, on average
        assert first.anchor.tolist() == sorted(set(first.anchor.tolist()) & set(everyone))
        assert {step.weight for step in steps} == {len(everyone) / 6}
        assert all(set(step.anchor.tolist()) <= set(first.anchor.tolist()) for step in steps)
        drawn[first.anchor] += first.weight / 300
    assert len(widths) == 300
    # Each anchor counts 1 on average, whatever row it is of; 6 standard deviations.
    assert (drawn[everyone] - 1).abs().max() < 6 * (len(everyone) / 6 / 300) ** 0.5
    again = next(drafter.unroll(batch._replace(seed=7), target))
    torch.manual_seed(99)
    assert torch.equal(next(drafter.unroll(batch._replace(seed=7), target)).anchor, again.anchor)
    assert not torch.equal(next(drafter.unroll(batch._replace(seed=8), target)).anchor, again.anchor)


def test_a_window_of_the_sample_is_that_of_all(target, tmp_path):
    """Though others are beside it, and padded otherwise."""
    drafter = drafter_for(target, filler(tmp_path / "model", "bert"))
    batch = batch_of(target, random_texts())
    every = {
        (int(a), s.depth): h
        for s in drafter.unroll(batch, target)
        for a, h in zip(s.anchor, s.hidden, strict=True)
    }
    drafter.train()
    for step in drafter.unroll(batch, target):
        for anchor, hidden in zip(step.anchor.tolist(), step.hidden, strict=True):
            torch.testing.assert_close(hidden, every[anchor, step.depth], rtol=0, atol=1e-4)


def test_it_trains_without_dropout(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model", "bert", hidden_dropout_prob=0.5)).train()
    assert drafter.training
    assert not any(module.training for module in drafter.model.modules())
    batch = batch_of(target, random_texts())
    once, again = (next(drafter.unroll(batch, target)).hidden for _ in range(2))
    assert torch.equal(once, again)


def learn(drafter, target, weights, steps=40, rate=1e-2) -> tuple[float, float]:
    """The loss over all anchors before and after training on samples of them."""
    batch, objective = batch_of(target, random_texts(4, 16)), Objective(divergences.kl, weights)
    total = drafter.settings["depth"] * 4 * 16

    def loss(seed):
        rows = drafter.unroll(batch._replace(seed=seed), target)
        return objective(rows, batch.last, target.head, {})[0] / total

    drafter.eval()
    before = float(loss(0).detach())
    drafter.train()
    weights = [w for group in drafter.param_groups() for w in group.weights]
    optimizer = torch.optim.AdamW(weights, rate, weight_decay=0.0)
    for seed in range(steps):
        optimizer.zero_grad()
        loss(seed).backward()
        optimizer.step()
    drafter.eval()
    return before, float(loss(0).detach())


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.ci("llama-all weights", "bert-adapters")
def test_it_learns(target, tmp_path, kind, lora):
    drafter = drafter_for(target, filler(tmp_path / "model", kind), lora=lora)
    before, after = learn(drafter, target, constant, rate=3e-2 if lora else 1e-2)
    assert after < (0.95 if lora else 0.8) * before


def test_a_streak_can_weigh_it(target, tmp_path):
    """Depths answer the same anchors, so their alphas line up."""
    drafter = drafter_for(target, filler(tmp_path / "model"))
    weights = Streak(1.0, 0.0)
    Objective(divergences.kl, weights).check(drafter)
    before, after = learn(drafter, target, weights, steps=5)
    assert before > 0
    assert after > 0


# -- adapters and files ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_alone_train_and_are_merged_when_loaded(target, tmp_path, kind):
    drafter = adapted(target, tmp_path / "model", kind)
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in drafter.named_parameters() if "lora_" in name}
    assert trained
    pair = target, drafter
    contract.test_gradients_reach_every_trainable_weight_and_none_of_the_targets(pair)
    contract.test_decoding_computes_the_laws_that_training_taught((target, drafter.eval()))
    (tmp_path / "saved").mkdir()
    hub.save(drafter, target, tmp_path / "saved")
    assert weights(tmp_path / "saved").keys() == trained
    loaded = hub.load(tmp_path / "saved", target)
    assert not [name for name, _ in loaded.named_parameters() if "lora_" in name]
    texts = random_texts()
    window = drafter.masked.window(texts, [24, 11])
    with torch.no_grad():
        rows = [d.masked.head(d.masked.read(window)) for d in (drafter, loaded)]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_drafter_comes_back_bit_for_bit(target, tmp_path, kind):
    drafter = drafter_for(target, filler(tmp_path / "model", kind), shift=1, steps=2)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "saved").mkdir()
    contract.test_a_saved_drafter_comes_back_bit_for_bit((target, drafter), tmp_path / "saved")


def test_it_is_loaded_in_the_targets_dtype(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    contract.test_the_target_is_no_part_of_the_drafter((target, drafter))
    hub.save(drafter, target, tmp_path)
    target.model.bfloat16()
    loaded = hub.load(tmp_path, target)
    assert {w.dtype for w in loaded.parameters()} == {torch.bfloat16}
    assert loaded.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    follower = Follower(loaded, target, random_texts(), (6, 4))
    assert follower.propose(SAMPLED).q.isfinite().all()


# -- the model's context ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "learned positions", "bert", "roberta"])
@torch.no_grad()
def test_of_a_long_text_it_reads_what_there_is_room_for(target, tmp_path, kind):
    more = {"n_positions": 12} if kind == "learned positions" else {}
    drafter = drafter_for(target, filler(tmp_path / "model", kind, max_position_embeddings=12, **more))
    room = 7 if kind == "roberta" else 9  # whose first two places are those of padding
    assert drafter.masked.room == room
    texts = random_texts()
    laws = unrolled(drafter, target, texts)
    for t in range(20):
        newest = texts[:1, max(0, t + 2 - room) : t + 2]
        window = drafter.masked.window(newest, [newest.shape[1]])
        rows = drafter.masked.head(drafter.masked.read(window)).softmax(-1)[0]
        for depth in range(1, K + 1):
            torch.testing.assert_close(laws[(0, t, depth)], rows[depth - 1], rtol=0, atol=ROUNDING)
    contract.test_decoding_computes_the_laws_that_training_taught((target, drafter))


def test_a_context_without_room_for_text_is_refused(target, tmp_path):
    said = refused(target, filler(tmp_path / "model", max_position_embeddings=12), depth=12)
    assert said == (
        "drafter.depth=12: the model reads 12 tokens, masks and text; set drafter.depth=11 or less"
    )


# -- the vocabulary and the mask -------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "mask"), [(V + 9, V + 8), (V + 9, 3), (V - 9, 3)])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_head_padded_otherwise_is_cut_or_filled_with_nothing(target, tmp_path, kind, vocab, mask):
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
    laws = unrolled(drafter, target, texts)
    for row, anchor in enumerate(follower.anchors):
        for depth in range(1, K + 1):
            torch.testing.assert_close(laws[row, anchor, depth], q[row, depth - 1], rtol=0, atol=ROUNDING)


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


def test_the_mask_is_what_is_given_or_what_the_folder_says(chat, tmp_path):
    target, folder = chat

    def mask(path, given):
        return drafter_for(target, str(path), mask_token=given).settings["mask_token"]

    assert mask(folder, None) == 260
    assert mask(folder, 7) == 7
    assert mask(folder, 0) == 0
    assert mask(folder, "<|pad|>") == 0
    bare = shutil.copytree(folder, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"mask_token_id": 9}))
    assert mask(bare, None) == 9
    assert mask(bare, 7) == 7


def test_no_mask_is_one_line_that_says_what_to_do(chat, tmp_path):
    target, folder = chat
    said = refused(target, filler(tmp_path / "bare", "bert", vocab=264), mask_token=None)
    assert said == (
        f"drafter.path={tmp_path / 'bare'}: neither its tokenizer nor its config.json names a mask token; "
        "set drafter.mask_token to the mask's id or text"
    )
    maskless = shutil.copytree(tmp_path / "bare", tmp_path / "maskless")
    make_tokenizer().save_pretrained(maskless)  # the folder's own would be made up: BERT's special tokens
    assert "names a mask token" in refused(target, str(maskless), mask_token=None)
    assert "has no token '<mask>'" in refused(target, str(folder), mask_token="<mask>")
    assert "has no token '[MASK]'" in refused(target, str(tmp_path / "bare"), mask_token="[MASK]")
    for number in (264, -1):
        said = refused(target, str(folder), mask_token=number)
        assert said == f"drafter.mask_token={number}: {folder} has the ids 0 to 263"


# -- what is refused -------------------------------------------------------------------------------


def test_a_model_that_cannot_be_used_is_one_line(target, tmp_path):
    assert (
        refused(target, "") == "drafter.path: give the folder or hub id of a masked diffusion language model"
    )
    assert "no such folder" in refused(target, str(tmp_path / "nowhere"))
    wide = filler(tmp_path / "wide", "bert", vocab=V + PADDING + 1)
    assert f"has {V + PADDING + 1} ids, the target's {V}" in refused(target, wide)
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    assert "a 't5' model is no masked or causal language model" in refused(target, str(tmp_path / "t5"))
    (tmp_path / "gone").mkdir()
    shutil.copy(Path(wide) / "config.json", tmp_path / "gone")
    assert "drafter.path=" in refused(target, str(tmp_path / "gone"))


def test_code_that_comes_with_a_model_is_not_run(target, tmp_path):
    """Dream's and LLaDA's folders are like this one."""
    folder = Path(filler(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "Dream", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('it ran')\n")
    assert str(folder) in refused(target, str(folder))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"depth": 0}, "drafter.depth=0 must be at least 1"),
        ({"anchors": 0}, "drafter.anchors=0 must be at least 1"),
        ({"steps": 0}, "drafter.steps=0 must be at least 1"),
        ({"steps": 4}, "drafter.steps=4: at most one for each of drafter.depth=3 masks"),
        ({"shift": 2}, "drafter.shift=2: choose 0 or 1"),
        ({"prefix": "both"}, "drafter.prefix=both: choose none or causal"),
        ({"lora": LORA, "train": False}, "drafter.lora: adapters are trained; leave drafter.train=true"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(target, tmp_path, changes, reason):
    assert refused(target, filler(tmp_path / "model"), **changes) == reason


def test_a_draft_deeper_than_the_masks_is_refused(target, tmp_path):
    drafter = drafter_for(target, filler(tmp_path / "model"), depth=2)
    with pytest.raises(UserError, match="predicts 2 tokens; set decode"):
        drafter.check(Plan(3))


def test_a_class_that_is_not_up_to_it_is_named(target, tmp_path, monkeypatch):
    drafter = drafter_for(target, filler(tmp_path / "model"))
    masked, inputs = drafter.masked, MaskedModel.inputs

    def wrong(**changes):
        monkeypatch.setattr(MaskedModel, "inputs", lambda self, window: inputs(self, window) | changes)
        with pytest.raises(UserError) as error:
            check_fills_masks(masked, "here")
        monkeypatch.setattr(MaskedModel, "inputs", inputs)
        return str(error.value)

    stem = "drafter.path=here: LlamaForCausalLM cannot fill in masks here: it "
    assert wrong(attention_mask=None) == stem + "attends to earlier tokens alone, whatever mask it is given"
    assert wrong(attention_mask=torch.zeros(2, 1, 9, 9)) == stem + "reads padding"
    assert wrong(position_ids="x").startswith(stem + "raised ")
    masked.head = replace(masked.head, scale=0.5)
    assert wrong() == stem + "does more to its logits than its head"
    check_fills_masks(drafter.masked, "here")


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory, chat) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("dllm"))
    shutil.copytree(chat[1], bench.root / "model")
    return bench


def options(bench: Bench, *more: str) -> list[str]:
    return ["drafter=hf_dllm", f"drafter.path={bench.root / 'model'}", *more]


@pytest.mark.parametrize("lora", ["null", "{r: 2, alpha: 4}"])
@pytest.mark.ci("null")
def test_a_run_trains_saves_and_scores_it(bench, monkeypatch, lora):
    taken, window = [], MaskedModel.window

    def spy(self, texts, lengths):
        if torch.is_grad_enabled():
            taken.append(len(lengths))
        return window(self, texts, lengths)

    monkeypatch.setattr(MaskedModel, "window", spy)
    more = ["drafter.anchors=3", f"drafter.lora={lora}", "weights=dpace", "decode=dynamic", "decode.depth=2"]
    done = bench.train(*options(bench, *more)).succeeded()
    assert done.err == ""
    assert taken == [2 * 3] * 6  # batch_size x anchors, a pass for every step
    card = json.loads((done.folder / "checkpoints" / "6" / "score.json").read_text())
    assert card["audit_passed"]
    assert card["replay_agrees"]
    assert card["drafter"] == "hf_dllm"
    assert any("lora_" in name for name in final(done.folder)) is (lora != "null")


@pytest.mark.proof
def test_a_run_that_trains_nothing_scores_it_as_it_is(bench):
    done = bench.train(*options(bench, "drafter.train=false", "drafter.steps=2", "seed=2")).succeeded()
    assert "drafter=hf_dllm: nothing is trained" in done.out
    assert json.loads((done.folder / "checkpoints" / "0" / "score.json").read_text())["audit_passed"]


@pytest.mark.proof
def test_what_is_wrong_shows_before_work_starts(bench):
    before = bench.runs()
    cases = {
        "drafter.path=null": "drafter.path: give the folder",
        "drafter.mask_token=nothing": "has no token 'nothing'",
        "drafter.depth=1": "this drafter predicts 1 tokens",
    }
    for change, reason in cases.items():
        done = bench.train(*options(bench, "seed=77"), change)
        done.refused(reason)
    done = bench.train(*options(bench, "seed=77", "drafter.steps=2", "decode.proposal=sampled"))
    assert done.code == 2
    assert "not be lossless" in done.err
    assert bench.runs() == before
    assert not leftovers(bench.root)
