"""Draft models with another tokenizer than the target's: `drafter.vocabulary=map`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from contract import *  # noqa: F403
from draft_models import LORA, draft_model, quick
from drafter_checks import CHAIN, ROUNDING, SAMPLED, TREE, Follower, V, batch_of, random_texts
from exact import check_lossless
from tokenizer_pairs import (
    LETTERS,
    fresh_logits,
    mapped,
    random_tokens,
    renamed,
    spelled,
    trained,
)
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from workbench import ROOT, make_target, make_tokenizer, train, weights

from decode.errors import UserError
from decode.evaluation.acceptance import round_counts
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.models.union import Union


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)


@pytest.fixture
def pair(target, tmp_path):
    """For the contract: all tokens are shared under other ids, so texts and drafts have one encoding."""
    return target, renamed(target, tmp_path)


@pytest.mark.parametrize("plan", [SAMPLED, TREE], ids=lambda plan: plan.name)
def test_with_the_targets_tokenizer_it_is_a_plain_draft_model(tmp_path, plan):
    """For any bytes: text in UTF-8 or not, special tokens among them."""
    target = load_target(str(make_target(tmp_path / "target")), "float32")
    path = draft_model(tmp_path / "draft", vocab=target.vocab_size)
    make_tokenizer().save_pretrained(path)
    plain, own = (DraftLM.for_target(target, path=path, vocabulary=name).eval() for name in ("same", "map"))
    texts = torch.randint(target.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    texts[0, 2:8] = torch.tensor(make_tokenizer()("é中\n")["input_ids"])
    followers = [Follower(drafter, target, texts) for drafter in (plain, own)]
    for counts in [(1, 3), (2, 1), (1, 1), (1, 4), (5, 2)]:
        for follower in followers:
            follower.advance(counts)
        drafts = [follower.propose(plan) for follower in followers]
        assert torch.equal(drafts[0].tokens, drafts[1].tokens)
        if plan == SAMPLED:
            torch.testing.assert_close(drafts[1].q, drafts[0].q, rtol=0, atol=1e-6)
    steps = [next(drafter.unroll(batch_of(target, texts), target)) for drafter in (plain, own)]
    assert steps[1].head.d2t.tolist() == list(range(target.vocab_size))
    found = dict(zip(steps[1].anchor.tolist(), steps[1].head(steps[1].hidden), strict=True))
    want = dict(zip(steps[0].anchor.tolist(), steps[0].head(steps[0].hidden), strict=True))
    assert found.keys() <= want.keys()  # but for the inside of letters
    assert len(found) > len(want) // 2
    for anchor, logits in found.items():
        torch.testing.assert_close(logits.softmax(-1), want[anchor].softmax(-1), rtol=0, atol=1e-6)


def test_frozen_weights_are_read_through_current_copies(target, tmp_path):
    drafter = renamed(target, tmp_path)
    for _ in range(2):  # weights that change are copied again
        want = Follower(drafter, target, random_texts(), (5, 3)).propose(SAMPLED).q
        with torch.inference_mode():
            found = Follower(drafter.requires_grad_(False), target, random_texts(), (5, 3)).propose(SAMPLED).q
        torch.testing.assert_close(found, want, rtol=0, atol=ROUNDING)
        drafter.requires_grad_(True)
        with torch.no_grad():
            drafter.model.get_output_embeddings().weight.mul_(2)


SMALL, LARGE = trained(300), trained(340)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("names", ["larger", "smaller"])
def test_state_is_a_fresh_encoding_of_the_whole_text(tiny_target, tmp_path, names, seed):
    """In ragged rows and any pieces, letters of several bytes cut between rounds."""
    theirs, own = (SMALL, LARGE) if names == "larger" else (LARGE, SMALL)
    target = tiny_target(vocab=len(theirs), hidden=16, positions=256, dtype=torch.float32)
    drafter = mapped(target, theirs, own, tmp_path)
    texts = torch.tensor([random_tokens(theirs, 80, 7 * seed + row) for row in range(3)])
    follower, dice = Follower(drafter, target, texts), torch.Generator().manual_seed(seed)
    cuts = 0
    while max(follower.settled) < 70:
        before = [list(text.ids) for text in follower.state.texts]
        follower.advance(torch.randint(1, 6, (3,), generator=dice).tolist())
        if follower.settled[0] % 3 == 0:
            follower.propose(CHAIN)  # writes scratch slots
        for row, known in enumerate(follower.known):
            ids = drafter.mapping.encode(drafter.mapping.target.spell(known))
            assert follower.state.texts[row].ids == ids
            assert follower.state.lm.lengths[row] == len(ids)
            cuts += ids[: len(before[row])] != before[row]
            want = fresh_logits(drafter, ids)
            torch.testing.assert_close(follower.state.logits[row], want, rtol=0, atol=10 * ROUNDING)
    assert cuts, "no token was ever taken back"


def test_only_shared_tokens_are_drafted_with_renormalised_probs(tiny_target, tmp_path):
    target = tiny_target(vocab=len(LARGE), hidden=16, positions=256, dtype=torch.float32)
    drafter = mapped(target, LARGE, SMALL, tmp_path)
    follower = Follower(drafter, target, torch.tensor([random_tokens(LARGE, 40, 1)]), [20])
    draft = follower.propose(SAMPLED)
    ids = list(follower.state.texts[0].ids)
    for depth in range(draft.depth):
        rows = fresh_logits(drafter, ids)  # over the shared tokens: softmax of them is q / sum of q
        want = torch.zeros(len(LARGE)).index_copy_(0, drafter.d2t, rows.softmax(-1))
        torch.testing.assert_close(draft.q[0, depth], want, rtol=0, atol=10 * ROUNDING)
        token = int(draft.tokens[0, depth])
        if token not in drafter.d2t.tolist():  # it was dictated
            break
        ids.append(int(drafter.t2d[token]))
    others = sorted(set(range(len(LARGE))) - set(drafter.d2t.tolist()))
    assert len(others) > 30
    assert not draft.q[..., others].any()
    assert set(follower.propose(TREE).tokens.unique().tolist()) <= {-1, *drafter.d2t.tolist()}


def test_trains_where_tokens_of_both_end(tiny_target, tmp_path):
    target = tiny_target(vocab=len(SMALL), hidden=16, positions=256, dtype=torch.float32)
    drafter = mapped(target, SMALL, LARGE, tmp_path)
    text = SMALL("the theatre of the north: süße Brötchen 🙂, these things")["input_ids"]
    mask = torch.ones(1, len(text), dtype=torch.bool)
    mask[0, -4:] = False
    (step,) = drafter.unroll(batch_of(target, torch.tensor([text]), mask), target)
    ends = SMALL.decode(text[:-4])
    spans = LARGE(ends, return_offsets_mapping=True)["offset_mapping"]
    spell = drafter.mapping.target.spell
    inner = {i for begin, end in spans for i in range(begin + 1, end)}  # letters inside a draft token
    whole = [t for t in range(len(text) - 4) if "\ufffd" not in spell(text[: t + 1]).decode(errors="replace")]
    want = {t for t in whole if len(spell(text[: t + 1]).decode()) not in inner}
    anchors = step.anchor.tolist()
    assert anchors == sorted(t - 1 for t in want if 1 <= t < len(text) - 5)
    assert len(whole) > len(want) > len(whole) // 4
    probs = step.head(step.hidden).softmax(-1)
    for anchor, p in zip(anchors, probs, strict=True):
        follower = Follower(drafter, target, torch.tensor([text]), [anchor + 1])
        torch.testing.assert_close(follower.state.logits[0].softmax(-1), p, rtol=0, atol=10 * ROUNDING)


def test_texts_without_an_anchor_train(tiny_target, tmp_path):
    target = tiny_target(vocab=len(SMALL), hidden=16, dtype=torch.float32)
    drafter = mapped(target, SMALL, LARGE, tmp_path)
    texts = torch.tensor([random_tokens(SMALL, 20, seed) for seed in range(2)])
    (step,) = drafter.unroll(batch_of(target, texts, torch.zeros_like(texts, dtype=torch.bool)), target)
    assert step.anchor.tolist() == []
    drafter.model.config.max_position_embeddings = 8
    (step,) = drafter.unroll(batch_of(target, texts), target)
    assert max(drafter.mapping.align(texts[0].tolist())[1]) > 8
    assert step.hidden.shape[0] == len(step.anchor)


TARGETS, OWN = ("a", "b", "c", "ab"), ("c", "b", "a", "d", "ba", "aa", "cd")
PLANS = {
    "chain": Plan(depth=2),
    "tree": Plan(depth=2, width=2, nodes=5),
    "sampled chain": Plan(depth=2, proposal="sampled"),
    "sampled chain, matched": Plan(depth=2, proposal="sampled", rule="match"),
    "siblings": Plan(tree=((0,), (1,), (0, 0)), proposal="sampled"),
    "hybrid tree": Plan(2, 2, 3, proposal="hybrid"),
}


def toy(tiny_target, folder):
    """a, b and c are shared and "ab" is not; the draft model's tokens span ends of the target's."""
    target = tiny_target(vocab=len(TARGETS))
    drafter = mapped(target, spelled(*TARGETS), spelled(*OWN), folder)
    assert drafter.d2t.tolist() == [0, 1, 2]
    assert drafter.mapping.encode(b"baab") == [4, 2, 1]
    return target, drafter


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.covering
def test_decoding_is_lossless(tiny_target, tmp_path, plan, temperature):
    """Every outcome of every coin is played through the production decoder."""
    target, drafter = toy(tiny_target, tmp_path)
    length = 4 if plan in ("chain", "tree") and not temperature else 3
    check_lossless(target, drafter, PLANS[plan], Sampler(temperature), length=length, rows=[0])


def refusal(target, path, **options) -> str:
    with pytest.raises(UserError) as error:
        DraftLM.for_target(target, path=path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_tokenizers_that_cannot_be_mapped_are_refused(target, tmp_path):
    drafter = renamed(target, tmp_path)
    path, where = str(tmp_path / "draft"), target.model.name_or_path
    assert "choose same or map" in refusal(target, path, vocabulary="other")
    assert "set drafter.path" in refusal(target, None, vocabulary="map")
    assert refusal(target, path).endswith("or set drafter.vocabulary=map")
    with pytest.raises(UserError, match=r"set on_policy\.share=0"):
        drafter.as_target(target)
    target.model.name_or_path = ""
    assert "target was built in memory, without a tokenizer" in refusal(target, path, vocabulary="map")
    target.model.name_or_path = where
    other = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    other.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(path)
    assert "neither byte-level BPE nor SentencePiece" in refusal(target, path, vocabulary="map")
    spelled("0", "1").save_pretrained(path)
    assert "share no token" in refusal(target, path, vocabulary="map")
    for file in (tmp_path / "draft").glob("*token*"):
        file.unlink()
    assert f"drafter.path={path}: no tokenizer" in refusal(target, path, vocabulary="map")


def test_shared_tokens_must_make_half_of_the_answers(tiny_target, tmp_path):
    target = tiny_target(vocab=3, dtype=torch.float32)
    drafter = mapped(target, spelled("a", "b", "ab"), spelled("b", "a"), tmp_path)
    assert drafter.needs_fit
    assert "2 of 3 tokens make 66.67%" in drafter.fit([Text([2, 0, 1, 2], [0, 1, 1, 1])], target)
    with pytest.raises(UserError, match=r"make 33\.33% .* at least 50% .* set drafter\.path"):
        drafter.fit([Text([0, 2, 2, 1], [0, 1, 1, 1])], target)


def saved(drafter, target, folder):
    folder.mkdir()
    checkpoint_io.save(drafter.requires_grad_(False), target, folder)
    return folder


def test_checkpoints_keep_the_tokenizer_without_its_folder(target, tmp_path):
    """Of adapters and in unions too."""
    adapted = renamed(target, tmp_path, lora=LORA)
    loaded = checkpoint_io.load(saved(adapted, target, tmp_path / "adapted"), target)
    assert torch.equal(loaded.d2t, adapted.d2t)
    union = Union(loaded, Ngram(1, 2), first_depth=None).eval()
    folder = saved(union, target, tmp_path / "union")
    shutil.rmtree(tmp_path / "draft")
    again = checkpoint_io.load(folder, target)
    for name in ("d2t", "draft_ids", "t2d", "tokenizer"):
        assert torch.equal(getattr(again.first, name), getattr(loaded, name))
    drafts = [Follower(one, target, random_texts(), (5, 3)).propose(SAMPLED) for one in (union, again)]
    assert torch.equal(drafts[0].q, drafts[1].q)


def test_weights_of_another_tokenizer_are_refused(target, tmp_path):
    drafter = renamed(target, tmp_path)
    folder = saved(drafter, target, tmp_path / "saved")
    assert checkpoint_io.warm_start(renamed(target, tmp_path), folder, target) == []
    (tmp_path / "more").mkdir()
    words = [*reversed(LETTERS), *"0123456789+-*/=()[]{"]
    other = mapped(target, spelled(*LETTERS), spelled(*words), tmp_path / "more", more=3)
    plain = DraftLM.for_target(target, path=draft_model(tmp_path / "plain"))
    for fresh in (other, plain):
        with pytest.raises(UserError, match="its draft model has another tokenizer"):
            checkpoint_io.warm_start(fresh, folder, target)


def test_export_has_the_tokenizer_and_engines_refuse(target, tmp_path):
    drafter = renamed(target, tmp_path)
    drafter.settings["config"]["eos_token_id"] = [3, 4]
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "hf")
    assert "assistant_tokenizer=" in layout.note
    (tmp_path / "hf").mkdir()
    layout.write(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.eos_token == own.convert_ids_to_tokens(3)
    texts = random_texts()
    with torch.no_grad():
        found, want = (
            model(input_ids=texts).logits
            for model in (AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval(), drafter.model)
        )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    for to in ("vllm", "sglang", "gguf"):
        with pytest.raises(UserError, match=f"^to={to}: .* set to=hf or native"):
            formats.check("lm", drafter.settings, target, to)


@pytest.mark.proof
def test_run_trains_and_scores(bench, tmp_path):
    """A draft model whose tokenizer has other ids and merges."""
    own = trained(300, ["<|end|>", "<|assistant|>"])
    path = draft_model(tmp_path / "draft", vocab=len(own), max_position_embeddings=256)
    own.save_pretrained(path)
    done = train(quick(bench, f"drafter.path={path}", "drafter.vocabulary=map")).succeeded()
    assert "shared tokens: 258 of 260 tokens" in done.out
    assert "special tokens that both have: <|assistant|>, <|end|>" in done.out
    card = json.loads((done.folder / "checkpoints" / "last" / "score.json").read_text())
    assert card["audit_passed"]
    first, last = (weights(done.folder / "checkpoints" / step) for step in ("3", "6"))
    assert {name for name in first if torch.equal(first[name], last[name])} == {"tokenizer"}


POCKET, COMPANION = ROOT / "data" / "pocket", ROOT / "data" / "pocket-draft"


def halved(folder: Path) -> Path:
    """The companion with the tokenizer that is trained on the same text with 2048 tokens in place of 4096.

    Byte-level BPE merges the same pairs in the same order, and ends sooner. No weight is trained again.
    """
    tokenizer = json.loads((COMPANION / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 2048}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    lm = AutoModelForCausalLM.from_pretrained(COMPANION)
    lm.resize_token_embeddings(2048)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(COMPANION).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.proof
def test_bundled_draft_model_with_half_the_tokens(tmp_path):
    """Run with -s for the figures of docs/drafters/lm.md."""
    target = load_target(str(POCKET), "float32")
    chat = Chat(load_tokenizer(str(POCKET)))
    held = read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")[:24]
    prompts = [chat.encode(prompt.messages) for prompt in held]
    options = {"max_new_tokens": 64, "stop": stop_tokens(target)}
    plain = generate(target, None, prompts, sampler=Sampler(0.0), **options).outputs
    own = DraftLM.for_target(target, path=str(halved(tmp_path / "draft")), vocabulary="map").eval()
    print(own.fit([Text(output.tokens, [1] * len(output.tokens)) for output in plain], target))
    assert len(own.d2t) == 2048
    same = DraftLM.for_target(target, path=str(COMPANION)).eval()
    for name, drafter in [("2048 tokens", own), ("4096 tokens", same)]:
        for plan, temperature in [(CHAIN, 0.0), (TREE, 0.0), (SAMPLED, 1.0)]:
            run = generate(target, drafter, prompts, sampler=Sampler(temperature), plan=plan, **options)
            counts = round_counts(run.outputs)
            print(f"{name}, {plan.name}, T={temperature:g}: tau {counts.tau:.2f}")
            assert temperature or [o.tokens for o in run.outputs] == [o.tokens for o in plain]
            assert counts.tau > 1.3
