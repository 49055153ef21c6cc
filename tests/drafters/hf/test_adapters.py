"""LoRA on file: adapters in PEFT's form, with the name of their base; merged on export."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from draft_models import LORA, adapted, draft_model, logits, quick
from drafter_checks import V, batch_of, random_texts
from fillers import adapted as adapted_filler
from medusas import moved
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from workbench import final, fork, kill_in_training, make_target, make_tokenizer, same, train, weights

from decode.errors import UserError
from decode.model.load import load_model
from distill.losses import divergences
from distill.losses.objective import Objective
from distill.losses.weights import constant
from distill.training.checkpointing import STATE
from drafters.checkpoint import io as checkpoint_io
from drafters.hf import lora_files
from drafters.hf.build import DOWN, UP
from drafters.hf.lora_files import LoraBase, locate_base
from drafters.models.lm import DraftLM

KINDS = ["tied", "learned positions"]  # nn.Linear, and GPT-2's transposed maps
NEAR = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)


def saved(drafter, target, folder: Path) -> Path:
    folder.mkdir()
    checkpoint_io.save(drafter, target, folder)
    return folder


def scatter(drafter: DraftLM) -> DraftLM:
    """As if trained."""
    for name, weight in drafter.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if "lora" in name else 0.01)
    return drafter


def change(folder: Path, **changes) -> None:
    """Settings of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["settings"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def base_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["settings"]["base"]


def refusal(folder: Path, target) -> str:
    with pytest.raises(UserError) as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def assert_alike(one, other, atol=1e-4) -> None:
    """Both have the same logits."""
    texts = random_texts()
    torch.testing.assert_close(logits(one.model, texts), logits(other.model, texts), rtol=0, atol=atol)


def test_a_checkpoint_holds_what_trains_and_names_the_base(target, tmp_path):
    drafter = adapted(target, tmp_path / "draft")
    drafter.add_confidence()
    folder = saved(scatter(drafter), target, tmp_path / "checkpoint")
    trained = {name: w for name, w in drafter.named_parameters() if w.requires_grad}
    held = weights(folder)
    assert held.keys() == trained.keys()
    assert all(torch.equal(held[name], trained[name]) for name in held)
    assert load_file(folder / "model.safetensors").keys() == {"confidence.weight", "confidence.bias"}
    assert LoraBase(**base_of(folder)).path == str(tmp_path / "draft")
    loaded = checkpoint_io.load(folder, target)
    assert_alike(loaded, drafter)
    assert torch.equal(loaded.confidence.weight, drafter.confidence.weight)
    assert drafter.unsaved_names == {name for name, w in drafter.state_dict().items() if name not in trained}


def test_it_is_loaded_without_peft_and_saved_again_it_is_a_whole_model(target, tmp_path, monkeypatch):
    folder = saved(adapted(target, tmp_path / "draft"), target, tmp_path / "checkpoint")
    monkeypatch.setitem(sys.modules, "peft", None)
    loaded = checkpoint_io.load(folder, target)
    assert loaded.settings["lora"] is loaded.settings["base"] is None
    assert not loaded.unsaved_names
    again = saved(loaded, target, tmp_path / "again")
    shutil.rmtree(tmp_path / "draft")
    assert same(checkpoint_io.load(again, target).state_dict(), loaded.state_dict())


@pytest.fixture
def cut(target, tmp_path) -> tuple[DraftLM, Path]:
    """Adapters of the target's first two layers, and their folder."""
    drafter = scatter(DraftLM.for_target(target, layers=2, lora=LORA))
    return drafter, saved(drafter, target, tmp_path / "checkpoint")


def test_a_base_that_was_cut_is_cut_again(target, cut):
    drafter, folder = cut
    assert (base_of(folder)["path"], base_of(folder)["layers"]) == (None, 2)
    assert_alike(checkpoint_io.load(folder, target), drafter)


def test_a_checkpoint_that_holds_the_whole_model_is_merged(target, tmp_path):
    drafter = adapted(target, tmp_path / "draft")
    folder = saved(drafter, target, tmp_path / "checkpoint")
    for name in lora_files.FILES:
        (folder / name).unlink()
    every = {n: w.contiguous() for n, w in drafter.state_dict().items() if "lm_head" not in n}
    save_file(every, folder / "model.safetensors")
    change(folder, lora=LORA, base=None)
    shutil.rmtree(tmp_path / "draft")
    assert_alike(checkpoint_io.load(folder, target), drafter)


def test_a_base_that_is_gone_or_another_is_one_line_that_says_what_to_do(target, tmp_path):
    base = tmp_path / "draft"
    folder = saved(adapted(target, base), target, tmp_path / "checkpoint")
    want = checkpoint_io.load(folder, target).state_dict()
    base.rename(tmp_path / "elsewhere")
    assert f"settings.base.path={base}: no such folder" in refusal(folder, target)
    change(folder, base=base_of(folder) | {"path": str(tmp_path / "elsewhere")})
    assert same(checkpoint_io.load(folder, target).state_dict(), want)
    model = load_model(str(tmp_path / "elsewhere"))
    model.model.layers[1].mlp.down_proj.weight.data *= 1.02  # a weight that nobody would look at first
    model.save_pretrained(tmp_path / "elsewhere")
    assert "trained on other weights than settings.base.path=" in refusal(folder, target)


@pytest.mark.parametrize(
    "base",
    [{"fingerprint": 3}, {"path": 3, "fingerprint": "x"}, {"layers": "x"}, {"layers": 99}, [1], {"evil": 1}],
    ids=str,
)
def test_a_damaged_base_is_one_line(target, cut, base):
    change(cut[1], base=base)
    refusal(cut[1], target)


def test_a_missing_adapter_is_noticed(target, cut):
    folder = cut[1]
    path = folder / "adapter_model.safetensors"
    pairs = load_file(path)
    stem = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    assert stem + "A.weight" in pairs
    save_file({name: w for name, w in pairs.items() if not name.startswith(stem)}, path)
    assert "2 adapters are missing" in refusal(folder, target)
    path.unlink()
    assert "28 adapters are missing" in refusal(folder, target)


def test_a_hub_id_is_named_with_the_commit_that_was_loaded(target):
    model = target.model
    model.config._commit_hash = "a" * 40
    assert locate_base(model, "owner/name", "main") == LoraBase("owner/name", "a" * 40)
    model.config._commit_hash = None
    assert locate_base(model, "owner/name", "v1") == LoraBase("owner/name", "v1")


@torch.no_grad()
def says(model, texts) -> torch.Tensor:
    return model(input_ids=texts).logits


def opened(base, folder: Path, texts) -> torch.Tensor:
    """Logits of real PEFT's model."""
    from peft import PeftModel

    before = says(base, texts)
    got = says(PeftModel.from_pretrained(base, folder).eval(), texts)
    assert (got - before).abs().max() > 0.1, "adapters that change nothing could not be missed"
    return got


@pytest.mark.parametrize(
    ("make", "kind", "door"),
    [
        *((adapted, kind, AutoModelForCausalLM) for kind in KINDS),
        (adapted_filler, "llama", AutoModelForCausalLM),
        (adapted_filler, "bert", AutoModelForMaskedLM),
    ],
)
def test_peft_opens_a_checkpoint(target, tmp_path, make, kind, door, recwarn):
    drafter, texts = make(target, tmp_path / "draft", kind), random_texts()
    folder = saved(drafter, target, tmp_path / "checkpoint")
    got = opened(door.from_pretrained(tmp_path / "draft").eval(), folder, texts)
    torch.testing.assert_close(got, says(drafter.model, texts), rtol=0, atol=1e-5)
    assert not [w for w in recwarn if "fan_in_fan_out" in str(w.message) or "missing" in str(w.message)]


def test_peft_opens_what_a_target_was_tuned_by(tiny_target, tmp_path):
    target, drafter = moved(tiny_target, dtype=torch.float32)
    texts, want = random_texts(), drafter.verifier(target)
    drafter.lora.export_adapter(target, tmp_path)
    drafter.lora.export(target, tmp_path / "plain")
    merged = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(merged[name], w) for name, w in want.model.state_dict().items())
    got = opened(target.model, tmp_path, texts)  # last: it leaves adapters in the target
    torch.testing.assert_close(got, logits(want.model, texts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_is_a_plain_model_that_says_the_same(tiny_target, tmp_path, kind, dtype):
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=dtype)
    drafter, texts = adapted(target, tmp_path / "draft", kind, r=2).to(dtype), random_texts()
    loaded = checkpoint_io.load(saved(drafter, target, tmp_path / "checkpoint"), target)
    shutil.rmtree(tmp_path / "draft")
    for name, one in {"adapted": drafter, "loaded": loaded}.items():
        one.export(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert again.dtype == dtype
        want = logits(one.model, texts)
        torch.testing.assert_close(logits(again, texts), want, rtol=NEAR[dtype], atol=NEAR[dtype])
    torch.testing.assert_close(logits(drafter.model, texts), want, rtol=0, atol=10 * NEAR[dtype])


@pytest.mark.parametrize(
    ("dtype", "stays"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_what_is_frozen_keeps_its_dtype_and_gets_no_gradient(target, tmp_path, dtype, stays):
    path = draft_model(tmp_path / "draft")
    load_model(path).to(dtype).save_pretrained(path)
    drafter = DraftLM.for_target(target, path=path, lora=LORA)
    drafter.add_confidence()
    trained = [w for w in drafter.parameters() if w.requires_grad]
    assert {w.dtype for w in trained} == {torch.float32}
    assert {w.dtype for w in drafter.parameters() if not w.requires_grad} == {stays}
    (group,) = drafter.param_groups()
    assert {id(w) for w in group.weights} == {id(w) for w in trained}
    scatter(drafter)
    before = {name: w.clone() for name, w in drafter.state_dict().items()}
    batch, objective = batch_of(target, random_texts()), Objective(divergences.kl, constant)
    steps = drafter.unroll(batch, target)
    loss, _ = objective(steps, batch.last, target.head, {}, confidence=drafter.confidence)
    loss.backward()
    torch.optim.AdamW(group.weights, 1e-3).step()
    assert all(w.grad is not None for w in trained)
    assert all(w.grad is None for w in drafter.parameters() if not w.requires_grad)
    after = drafter.state_dict()
    moved_names = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved_names == before.keys() - drafter.unsaved_names
    loaded = checkpoint_io.load(saved(drafter, target, tmp_path / "checkpoint"), target)
    assert {w.dtype for w in loaded.parameters()} == {torch.float32}
    stem = "model.model.layers.1.self_attn.q_proj"
    down, up = after[stem + DOWN], after[stem + UP]
    merged = after[f"{stem}.base_layer.weight"].float() + LORA["alpha"] / LORA["r"] * (up @ down)
    torch.testing.assert_close(loaded.state_dict()[f"{stem}.weight"], merged, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (LORA | {"dropout": 0.1}, "drafter.lora.dropout: there is no such option"),
        ({"alpha": 4}, "drafter.lora.r=None"),
        ({"r": 0, "alpha": 4}, "drafter.lora.r=0"),
        ({"r": 2, "alpha": 0.5}, "drafter.lora.alpha=0.5"),
        (LORA | {"targets": ["embed_tokens"]}, "only linear maps can have adapters"),
        (LORA | {"targets": ["lm_head"]}, "the head is the embedding as well"),
    ],
    ids=str,
)
def test_adapters_of_nothing_are_refused(target, tmp_path, lora, reason):
    with pytest.raises(UserError, match=reason) as error:
        DraftLM.for_target(target, path=draft_model(tmp_path / "draft"), lora=lora)
    assert "\n" not in str(error.value)


@pytest.mark.proof
def test_a_killed_run_ends_with_the_same_bits_and_its_state_is_small(bench, tmp_path, monkeypatch):
    base = make_target(tmp_path / "base", seed=1)  # of the target's own copy there is nothing to learn
    argv = quick(bench, f"drafter.path={base}", "drafter.lora={r: 2, alpha: 4}", "drafter.confidence=true")
    argv += ["score.enabled=false", "score.every=2", "objective=kl", "weights=constant"]
    straight = train(argv).succeeded()
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert fork(lambda: train(argv).code) == 9
    moved_away = base.rename(tmp_path / "before")
    model = load_model(str(moved_away))
    model.model.norm.weight.data += 0.1
    model.save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    train(argv).refused("the model that the adapters belong to has changed")
    shutil.rmtree(base)
    moved_away.rename(base)
    done = train(argv).succeeded()
    assert "resuming from step 2" in done.out
    ours = final(straight.folder)
    assert all(w.abs().max() > 1e-6 for name, w in ours.items() if "lora_B" in name)
    assert same(final(done.folder), ours)
    state = torch.load(done.folder / "checkpoints" / "6" / STATE, weights_only=True)  # noqa: TID251  (state is no safetensors)
    assert state["state_dict"].keys() == {f"drafter.{name}" for name in ours}
    moments = state["optimizer_states"][0]["state"]
    assert len(moments) == len(ours)
    assert sorted(m["exp_avg"].shape for m in moments.values()) == sorted(w.shape for w in ours.values())


def fresh(target, tmp_path, **options) -> DraftLM:
    torch.manual_seed(7)
    return DraftLM.for_target(target, path=str(tmp_path / "draft"), **options)


def test_training_starts_from_adapters(target, tmp_path):
    drafter = adapted(target, tmp_path / "draft")
    folder = saved(drafter, target, tmp_path / "checkpoint")
    for options in ({"lora": LORA}, {"lora": LORA | {"alpha": 20}}, {}):
        new = fresh(target, tmp_path, **options)
        assert checkpoint_io.warm_start(new, folder, target) == []
        assert_alike(new, drafter)
        assert all(w.requires_grad for w in new.parameters()) is not bool(options)


def test_adapters_of_another_model_are_no_start(target, tmp_path):
    folder = saved(adapted(target, tmp_path / "draft"), target, tmp_path / "checkpoint")
    whole = saved(fresh(target, tmp_path), target, tmp_path / "whole")
    for options in ({"layers": 2}, {"layers": 2, "lora": LORA}):
        stranger = DraftLM.for_target(target, **options)
        with pytest.raises(UserError, match=f"on another model; set drafter.path={tmp_path / 'draft'}$"):
            checkpoint_io.warm_start(stranger, folder, target)
    other = fresh(target, tmp_path, lora=LORA)
    with pytest.raises(UserError, match=r"it contains a whole model, .* set drafter\.lora=null"):
        checkpoint_io.warm_start(other, whole, target)
    with pytest.raises(UserError, match="none of its 28 tensors fits this drafter"):
        checkpoint_io.warm_start(fresh(target, tmp_path, lora=LORA | {"r": 4}), folder, target)
    change(folder, base={"path": 1})
    with pytest.raises(UserError, match="damaged checkpoint"):
        checkpoint_io.warm_start(other, folder, target)
