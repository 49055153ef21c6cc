"""Independent draft models: any folder, vocabularies, caches, files, and a run that trains nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import contract
import pytest
import torch
from draft_models import KINDS, draft_model, quick
from drafter_checks import CHAIN, SAMPLED, TREE, Follower, K, V, random_texts
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast
from workbench import ROOT, Bench, leftovers, make_target, make_tokenizer, train

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.sampling import Sampler
from distill.utils.run_folder import checkpoints
from drafters.checkpoint import io as checkpoint_io
from drafters.models.lm import DraftLM


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)


def drafter_for(target, path: str) -> DraftLM:
    return DraftLM.for_target(target, path=path).to(target.dtype).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_keeps_the_contract(target, tmp_path, monkeypatch, kind):
    """Windows and additive masks over scratch slots above all."""
    pair = target, drafter_for(target, draft_model(tmp_path / "draft", kind))
    contract.test_decoding_computes_the_probs_of_training(pair)
    contract.test_proposing_changes_nothing_for_later_rounds(pair)
    contract.test_every_level_of_a_tree_computes_the_probs_of_training(pair, monkeypatch)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple:
    """A target in fp64, and the same folder as its draft model."""
    folder = str(make_target(tmp_path_factory.mktemp("own") / "target"))
    target = load_target(folder, "float64")
    return target, drafter_for(target, folder)


@pytest.mark.parametrize(
    ("plan", "sampler"),
    [(CHAIN, Sampler(0.0)), (SAMPLED, Sampler(1.0)), (SAMPLED, Sampler(0.7, top_p=0.9))],
    ids=str,
)
def test_targets_own_folder_is_accepted_whole(own, plan, sampler):
    target, drafter = own
    prompts, rounds = [[7, 8, 9, 10, 11], [12], [20, 30, 40]], 6
    longest = 1 + rounds * (K + 1)
    run = generate(target, drafter, prompts, max_new_tokens=longest, sampler=sampler, plan=plan)
    assert [o.emitted for o in run.outputs] == [[K + 1] * rounds] * 3


def test_draft_of_k_tokens_costs_k_passes(own):
    """The first needs none of its own: the root was read when it was settled."""
    target, drafter = own
    passes = []
    handle = drafter.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    rounds = 4
    options = {"max_new_tokens": 1 + rounds * (K + 1), "sampler": Sampler(0.0), "plan": CHAIN}
    generate(target, drafter, [[7, 8, 9]], **options)
    handle.remove()
    # The prompt and its root; then chains, and between them what was accepted and the new root.
    chain, between = [1] * (K - 1), [K + 1]
    assert passes == [4, *chain, *(between + chain) * (rounds - 1)]


def test_text_past_the_context_is_the_targets(target, tmp_path):
    for kind, name in (("learned positions", "n_positions"), ("tied", "max_position_embeddings")):
        drafter = drafter_for(target, draft_model(tmp_path / kind, kind, **{name: 16}))
        prompts = [[1, 2, 3, 4, 5], list(range(20))]
        options = {"max_new_tokens": 20, "sampler": Sampler(0.0)}
        plain = [o.tokens for o in generate(target, None, prompts, **options).outputs]
        for plan in (CHAIN, TREE):
            run = generate(target, drafter, prompts, plan=plan, **options)
            assert [o.tokens for o in run.outputs] == plain


@pytest.mark.parametrize("vocab", [V - 9, V + 9])
def test_head_of_another_size_is_cut_or_padded(target, tmp_path, vocab):
    drafter = drafter_for(target, draft_model(tmp_path / "draft", vocab=vocab))
    follower = Follower(drafter, target, random_texts(), (5, 3))
    assert follower.texts.max() >= V - 9  # tokens that a smaller draft model lacks
    q = follower.propose(SAMPLED).q
    torch.testing.assert_close(q.sum(-1), torch.ones(2, K))
    assert not q[..., vocab:].any()
    for plan in (CHAIN, TREE):
        assert follower.propose(plan).tokens.max() < min(vocab, V)


def renamed(folder: Path, count: int) -> None:
    """Swap the ids of `count` tokens in the folder's tokenizer, pair by pair."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    names = [w for w in sorted(words, key=lambda w: words[w]) if w[0] != "<"][:count]
    for a, b in zip(names[::2], names[1::2], strict=True):
        words[a], words[b] = words[b], words[a]
    file.write_text(json.dumps(content))


def test_other_tokenizer_is_refused(tmp_path):
    target = load_target(str(make_target(tmp_path / "target")))
    same = make_target(tmp_path / "same", seed=1)
    DraftLM.for_target(target, path=str(same))
    renamed(same, 2)  # of 260: a special token or two may have another name
    DraftLM.for_target(target, path=str(same))
    renamed(same, 60)
    with pytest.raises(UserError, match=r"5\d of 260 token ids differ from the target's tokenizer"):
        DraftLM.for_target(target, path=str(same))
    for file in same.glob("*token*"):
        file.unlink()
    DraftLM.for_target(target, path=str(same))  # nothing to compare, and the sizes are equal


def test_padded_head_with_the_same_tokenizer_is_accepted(tmp_path):
    """Far more padding than could be told from another vocabulary."""
    target = load_target(str(make_target(tmp_path / "target")))
    draft = Path(draft_model(tmp_path / "draft", vocab=1024))
    with pytest.raises(UserError, match="has 1024 ids"):
        DraftLM.for_target(target, path=str(draft))
    tokenizer = make_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(draft)
    assert DraftLM.for_target(target, path=str(draft)).model.config.vocab_size == 1024


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda at: at / "nowhere", "no such folder"),
        (lambda at: at, r"no config\.json in it"),
        (lambda at: draft_model(at / "m"), "no causal language model"),
    ],
    ids=["nowhere", "empty", "encoder"],
)
def test_model_that_is_not_causal_is_refused(target, tmp_path, make, reason):
    path = str(make(tmp_path))
    config = Path(path) / "config.json"
    if config.exists():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "bert"}))
    with pytest.raises(UserError, match=f"^drafter.path={path}: .*{reason}") as error:
        DraftLM.for_target(target, path=path)
    assert "\n" not in str(error.value)


def test_bundled_draft_model_drafts_for_the_bundled_target(pocket):
    drafter = drafter_for(pocket, str(ROOT / "data" / "pocket-draft"))
    prompts = [[1, 300 + i, 41, 1000 - i, 2] for i in range(4)]
    options = {"max_new_tokens": 32, "sampler": Sampler(0.0)}
    plain = [o.tokens for o in generate(pocket, None, prompts, **options).outputs]
    outputs = generate(pocket, drafter, prompts, plan=CHAIN, **options).outputs
    assert [o.tokens for o in outputs] == plain
    assert sum(sum(o.emitted) for o in outputs) / sum(len(o.emitted) for o in outputs) > 1.5


def test_tied_matrix_is_saved_once(target, tmp_path):
    drafter = drafter_for(target, draft_model(tmp_path / "draft"))
    shutil.rmtree(tmp_path / "draft")
    (tmp_path / "saved").mkdir()
    checkpoint_io.save(drafter, target, tmp_path / "saved")
    names = [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "layers" not in name]
    assert sorted(names) == ["model.model.embed_tokens.weight", "model.model.norm.weight"]
    loaded = checkpoint_io.load(tmp_path / "saved", target)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    texts = random_texts()
    with torch.no_grad():
        rows = [d.model(input_ids=texts, use_cache=False).logits for d in (drafter, loaded)]
    assert torch.equal(*rows)


def given(bench: Bench, *more: str) -> list[str]:
    """Overrides of a quick run with a copy of the target as draft model."""
    return quick(bench, f"drafter.path={bench.target}", "score.max_new_tokens=7", *more, drafter="lm_given")


def test_run_saves_and_scores_the_given_model(bench, tmp_path):
    done = train(given(bench)).succeeded()
    assert done.err == ""
    assert "nothing is trained" in done.out
    folder = done.folder
    assert (folder / "done").exists()
    (checkpoint,) = checkpoints(folder)
    assert {p.name for p in checkpoint.iterdir()} == {"model.safetensors", "config.json", "score.json"}
    for link in ("best", "last"):
        assert (folder / "checkpoints" / link).readlink() == Path("0")
    assert not (bench.root / "outputs" / "rollouts").exists()
    assert not leftovers(bench.root)
    assert "score/tau" in (folder / "csv" / "metrics.csv").read_text()
    card = json.loads((checkpoint / "score.json").read_text())
    said = {"audit_passed": True, "step": 0, "drafter": "lm"}
    assert {name: card[name] for name in said} == said
    assert card["headline"]["tau"] == 3.0
    assert card["drafter_kv_bytes_per_token"] == card["kv_bytes_per_token"] > 0  # it is the target's twin
