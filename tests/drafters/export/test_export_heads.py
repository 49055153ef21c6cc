"""Heads and whole models in other programs' files: loaded by their rules they have our logits."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import served_authors
import served_heads
import torch
from draft_models import draft_model
from drafter_checks import Follower, K, V, batch_of, equal, plans_of, random_texts
from fillers import drafter_for, filler
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from workbench import make_target, same

from decode.errors import UserError
from decode.model.load import load_target
from decode.model.target import LAST, Target
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.models.lm import DraftLM

MEDUSA = [{}, {"own_head": False}, {"layers": 2, "bias": True}]
MLP = [
    {"tie_weights": True, "scale_input": True},
    {"tie_weights": False, "scale_input": False, "inner_size": 24},
    {"tie_weights": True, "scale_input": False, "inner_size": 8},
    {"tie_weights": True, "scale_input": True, "depth": 1},
]


@pytest.fixture
def target(tiny_target) -> Target:
    target = tiny_target(vocab=V, layers=2, hidden=16, dtype=torch.float32)
    target.model.lm_head.weight.data.mul_(0.3)
    target.tap([LAST])
    return target


def exported(drafter, target, folder, to="vllm"):
    """The checkpoint, loaded and written for another program; its command's tokens."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    checkpoint_io.save(drafter, target, checkpoint)
    layout = formats.write_layout(checkpoint_io.as_saved(checkpoint_io.load(checkpoint, target)), target, to)
    (folder / to).mkdir()
    layout.write(folder / to)
    return folder / to, layout


def files(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def speculative(layout, target="t", drafter="d"):
    """What vLLM's command says in its JSON."""
    words = shlex.split(layout.command(target, drafter))
    return words, json.loads(words[words.index("--speculative-config") + 1])


@torch.no_grad()
def ours(drafter, target, features, read) -> list[torch.Tensor]:
    """Logits of every depth from training, as if the features were the target's."""
    # Anchor 0 of each row: its feature is the row's tap, and x_1, x_2, ... are what it reads.
    texts = torch.cat([torch.zeros_like(read[:, :1]), read, read[:, :2]], 1)
    batch = batch_of(target, texts)
    taps = batch.taps.clone()
    taps[:, 0, 0] = features
    steps = drafter.unroll(batch._replace(taps=taps), target)
    length = texts.shape[1]
    return [step.head(step.hidden)[step.anchor % length == 0] for step in steps]


def inputs(depth=K):
    dice = torch.Generator().manual_seed(7)
    return torch.randn(100, 16, generator=dice), torch.randint(V, (100, depth), generator=dice)


def gap(one, other) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("form", MEDUSA, ids=str)
def test_vllm_makes_our_medusa_of_it(target, make_drafter, tmp_path, form, scale):
    target.head = replace(target.head, scale=scale)
    drafter = make_drafter("medusa", target, depth=K, **form)
    folder, layout = exported(drafter, target, tmp_path)
    _, asked = speculative(layout)
    assert asked == {"method": "medusa", "model": "d", "num_speculative_tokens": K}
    run = served_heads.medusa(*files(folder), tokens=asked["num_speculative_tokens"])
    features, read = inputs()
    assert gap(run(features), ours(drafter, target, features, read)) < 1e-5


def test_a_soft_cap_changes_no_token_that_vllm_drafts(target, make_drafter, tmp_path):
    target.head = replace(target.head, softcap=2.0)
    drafter = make_drafter("medusa", target, depth=K)
    folder, _ = exported(drafter, target, tmp_path)
    features, read = inputs()
    theirs, own = served_heads.medusa(*files(folder), K)(features), ours(drafter, target, features, read)
    assert gap([2 * torch.tanh(z / 2) for z in theirs], own) < 1e-5
    assert all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(theirs, own, strict=True))


@pytest.mark.parametrize("form", MLP, ids=str)
def test_vllm_makes_our_speculator_of_it(target, make_drafter, tmp_path, form):
    drafter = make_drafter("mlp", target, **{"depth": K} | form)
    folder, layout = exported(drafter, target, tmp_path)
    words, asked = speculative(layout)
    assert words[0] == "VLLM_USE_V1=0"
    assert asked == {"method": "mlp_speculator", "model": "d", "num_speculative_tokens": drafter.depth}
    run = served_heads.mlp(*files(folder), asked["num_speculative_tokens"])
    features, read = inputs(drafter.depth)
    assert gap(run(features, read), ours(drafter, target, features, read)) < 1e-5


def test_the_command_survives_any_path(target, make_drafter, tmp_path):
    _, layout = exported(make_drafter("medusa", target), target, tmp_path)
    words, asked = speculative(layout, "/a b/it's", '/c d/{x}"s')
    assert words[:3] == ["vllm", "serve", "/a b/it's"]
    assert asked["model"] == '/c d/{x}"s'


def assert_alike(target, one, other) -> None:
    """Same settings, weights and drafts."""
    unused = ("info_rank", "hot_tokens")  # of a bias that there is not
    ours, theirs = ({n: v for n, v in each.settings.items() if n not in unused} for each in (one, other))
    assert (type(one), ours) == (type(other), theirs)
    assert same(one.state_dict(), other.state_dict())
    drafts = []
    for drafter in (one, other):
        follower = Follower(drafter.requires_grad_(False), target, random_texts(), (5, 3))
        drafts.append([follower.propose(plan) for plan in plans_of(drafter)])
    assert all(equal(*pair) for pair in zip(*drafts, strict=True))


@pytest.mark.parametrize(
    ("name", "form"), [*(("medusa", form) for form in MEDUSA), *(("mlp", form) for form in MLP[:2])], ids=str
)
def test_what_was_exported_comes_back(target, make_drafter, tmp_path, name, form):
    drafter = make_drafter(name, target, depth=K, **form)
    if name == "mlp":
        drafter.settings["inner_size"] = drafter.inner  # a file says what 0 stands for
    folder, _ = exported(drafter, target, tmp_path)
    assert_alike(target, drafter, checkpoint_io.load(folder, target))
    fresh = make_drafter(name, target, seed=3, depth=K, **form)
    assert checkpoint_io.warm_start(fresh, folder, target) == []


def fasterdecoding(drafter, folder, name):
    """A folder as its authors' code writes it; their published configs name too few heads."""
    tensors = {}
    for i, block in enumerate(drafter.blocks):
        for j, layer in enumerate(block.layers):
            tensors |= {f"{i}.{j}.linear.{part}": w.detach() for part, w in layer.named_parameters()}
        tensors[f"{i}.{len(block.layers)}.weight"] = drafter.lm_heads[i].weight.detach()
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}'
    )
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize("form", [{}, {"own_head": False}, {"bias": True}, {"depth": 5}], ids=str)
def test_the_authors_make_our_medusa_of_it(target, make_drafter, tmp_path, form):
    target.model.config._name_or_path = target.model.name_or_path = "some/target"
    drafter = make_drafter("medusa", target, **{"depth": K} | form)
    folder, layout = exported(drafter, target, tmp_path, "authors")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "medusa_lm_head.pt"]
    assert ("builds 5 heads" in layout.note) is (drafter.depth != 5)
    run = served_authors.medusa(folder, "some/target", target.head.weight)
    back = checkpoint_io.load(folder, target)
    features, read = inputs(drafter.depth)
    for one in (drafter, back):
        assert gap(run(features), ours(one, target, features, read)) < 1e-5
    if drafter.settings["own_head"]:  # a shared head is read as one of each depth
        assert_alike(target, drafter, back)
    held = torch.load(folder / "medusa_lm_head.pt", weights_only=True)  # noqa: TID251  (as they read it)
    heads = {value.data_ptr() for value in held.values() if len(value) == V}
    assert len(heads) == (drafter.depth if drafter.settings["own_head"] else 1)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_fasterdecodings_own_files_are_read(target, make_drafter, tmp_path, name, layers):
    drafter = make_drafter("medusa", target, depth=K, layers=layers, bias=True)
    folder = fasterdecoding(drafter, tmp_path / "theirs", name)
    assert_alike(target, drafter, checkpoint_io.load(folder, target))


def test_ibms_files_are_read(target, make_drafter, tmp_path):
    """With a prefix, in parts, and with what is shared under every depth's name."""
    drafter = make_drafter("mlp", target, depth=K, tie_weights=True, scale_input=True, inner_size=24)
    folder, layout = exported(drafter, target, tmp_path)
    (folder / "model.safetensors").unlink()
    whole = {f"speculator.{n}": w.detach().clone() for n, w in drafter.state_dict().items()}
    assert len(whole) > len(layout.tensors)
    names = sorted(whole)
    index = {}
    for part, kept in enumerate((names[:4], names[4:]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({n: whole[n] for n in kept}, folder / file)
        index |= dict.fromkeys(kept, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_alike(target, drafter, checkpoint_io.load(folder, target))


@pytest.mark.parametrize("name", ["medusa", "mlp"])
def test_files_for_another_target_are_refused(target, make_drafter, tiny_target, tmp_path, name):
    folder, _ = exported(make_drafter(name, target), target, tmp_path)
    for change, reason in [
        ({"hidden": 8}, "its hidden size is 16, the target's 8"),
        ({"vocab": V + 1}, f"its vocabulary is {V}, the target's {V + 1}"),
    ]:
        other = tiny_target(**{"vocab": V, "hidden": 16, "dtype": torch.float32} | change)
        with pytest.raises(UserError, match=reason):
            checkpoint_io.load(folder, other)


DAMAGED = [
    ("medusa", "blocks.1.layers.0.weight", None, "1 tensors are missing, blocks.1.layers.0.weight"),
    ("medusa", "lm_heads.2.weight", None, "1 tensors are missing, lm_heads.2.weight"),
    ("medusa", "blocks.99999999.layers.99999999.weight", torch.zeros(1), "tensors are missing"),
    ("medusa", f"blocks.{'9' * 5000}.layers.0.weight", torch.zeros(1), "damaged checkpoint"),
    ("medusa", "model.layers.0.x", torch.zeros(1), "1 tensors have no place"),
    ("medusa", "token_map", torch.zeros(7), "its heads cover 7 tokens"),
    ("mlp", "ln.0.bias", None, "1 tensors are missing, ln.0.bias"),
    ("mlp", "ln0.weight", torch.zeros(1), "no place in such a drafter, ln0.weight"),
    ("mlp", "n_predict", 10**9, "n_predict=1000000000"),
    ("mlp", "inner_dim", 10**12, "inner_dim=1000000000000"),
    ("mlp", "model.safetensors", None, "no weights there"),
]


@pytest.mark.parametrize(("name", "key", "value", "reason"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_folder_is_one_line(target, make_drafter, tmp_path, name, key, value, reason):
    folder, _ = exported(make_drafter(name, target), target, tmp_path)
    config, tensors = files(folder)
    if key in config:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
    elif key == "model.safetensors":
        (folder / key).unlink()
    else:
        kept = {n: w for n, w in tensors.items() if n != key}
        save_file(kept if value is None else kept | {key: value}, folder / "model.safetensors")
    with pytest.raises(UserError, match=reason) as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)


def test_another_scale_is_put_into_the_heads(target, make_drafter, tmp_path):
    target.head = replace(target.head, scale=0.25)
    drafter = make_drafter("medusa", target, depth=K, own_head=False)
    folder, _ = exported(drafter, target, tmp_path)
    config, tensors = files(folder)
    (folder / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    loaded = checkpoint_io.load(folder, target)
    assert loaded.settings["own_head"]
    features, read = inputs()
    theirs = served_heads.medusa(config | {"logit_scale": 0.5}, tensors, K)(features)
    assert gap(theirs, ours(loaded, target, features, read)) < 1e-5


@pytest.mark.parametrize("own_head", [True, False])
def test_heads_for_a_target_whose_head_has_a_bias_are_refused(target, make_drafter, tmp_path, own_head):
    drafter = make_drafter("medusa", target, own_head=own_head)
    folder, _ = exported(drafter, target, tmp_path)
    target.head = replace(target.head, bias=torch.zeros(V))
    with pytest.raises(UserError, match="this target's head has a bias"):
        checkpoint_io.load(folder, target)


def draft(folder, kind, vocab) -> str:
    """A folder with a random GPT-2, or a Llama with wavelengths of its own."""
    if kind == "learned positions":
        return draft_model(folder, kind, vocab)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return draft_model(folder, "tied", vocab, tie_word_embeddings=kind == "tied", rope_parameters=rope)


@torch.no_grad()
def says(model, texts):
    return model(input_ids=texts).logits


def reopened(folder, door=AutoModelForCausalLM):
    return door.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Target:
    """A target with a place, a tokenizer and an end of text."""
    return load_target(str(make_target(tmp_path_factory.mktemp("chat") / "target")))


@pytest.mark.parametrize("to", ["hf", "vllm", "sglang", "transformers"])
@pytest.mark.parametrize("form", ["untied", "adapted", "tied", "cut"])
@pytest.mark.covering
def test_a_draft_model_is_a_plain_folder(chat, tmp_path, form, to):
    path = None if form == "cut" else draft(tmp_path / "draft", form, chat.vocab_size)
    lora = {"r": 2, "alpha": 4} if form == "adapted" else None
    drafter = DraftLM.for_target(chat, path=path, layers=1, lora=lora).eval()
    for name, weight in drafter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    folder, layout = exported(drafter, chat, tmp_path, to)
    model, texts = reopened(folder), random_texts()
    assert float((says(model, texts) - says(drafter.model, texts)).abs().max()) < 1e-5
    config, tensors = files(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == chat.vocab_size
    assert config["torch_dtype"] == "float32"
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert ("lm_head.weight" in tensors) is (form != "tied")
    assert not [name for name in tensors if "lora" in name]
    assert model.generation_config.eos_token_id == chat.model.generation_config.eos_token_id
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, chat.model.name_or_path))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template
    advice = layout.command("t", "d") + layout.note
    assert ("STANDALONE" in advice) is (to == "sglang")
    assert ("draft_model" in advice) is (to == "vllm")
    assert ("to=vllm" in advice) is (to == "hf")


@pytest.mark.parametrize("kind", ["untied", "tied", "learned positions"])
@pytest.mark.parametrize("more", [-5, 7])
def test_engines_get_the_targets_vocabulary_size(chat, tmp_path, monkeypatch, more, kind):
    """GPT-2, of learned positions, is tied, its maps lie the other way, and its names are its own."""
    monkeypatch.setattr("drafters.models.lm.check_vocabulary", lambda *_: None)  # the padding is at stake
    size = chat.vocab_size + more
    drafter = DraftLM.for_target(chat, path=draft(tmp_path / "draft", kind, size)).eval()
    folder, _ = exported(drafter, chat, tmp_path)
    assert files(folder)[0]["vocab_size"] == chat.vocab_size
    texts = random_texts()
    found, want = says(reopened(folder), texts), says(drafter.model, texts)
    both = min(size, chat.vocab_size)
    assert found.shape[-1] == chat.vocab_size
    assert float((found[..., :both] - want[..., :both]).abs().max()) < 1e-5
    assert int(found.argmax(-1).max()) < both
    if more < 0:
        mean = want.mean(-1, keepdim=True).expand(-1, -1, -more)
        torch.testing.assert_close(found[..., both:], mean, rtol=0, atol=1e-5)
    assert formats.write_layout(checkpoint_io.as_saved(drafter), chat, "hf").config["vocab_size"] == size
    if more < 0 and kind == "untied":  # a new id is read as the last one
        texts[:, 3], others = size + 1, texts.clone()
        others[:, 3] = size - 1
        assert torch.equal(says(reopened(folder), texts), says(reopened(folder), others))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_model_that_fills_in_masks_is_a_plain_folder(target, tmp_path, kind):
    drafter = drafter_for(target, filler(tmp_path / "filler", kind))
    if kind == "bert":
        torch.nn.init.normal_(drafter.model.cls.predictions.bias)
    folder, layout = exported(drafter, target, tmp_path, "hf")
    assert files(folder)[0]["mask_token_id"] == drafter.settings["mask_token"]
    again = reopened(folder, AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM)
    texts = random_texts()
    assert float((says(again, texts) - says(drafter.model, texts)).abs().max()) < 1e-5
    assert "no engine" in layout.note


def test_medusa2_is_two_folders(target, make_drafter, tmp_path):
    drafter = make_drafter("medusa2", target, depth=K)
    heads, layout = exported(drafter, target, tmp_path)
    assert speculative(layout)[0][2] == "TUNED_TARGET"
    assert "to=hf" in layout.note
    (tmp_path / "again").mkdir()
    whole, _ = exported(drafter, target, tmp_path / "again", "hf")
    texts = random_texts()
    want = says(drafter.verifier(target).model, texts)
    # The tiny target's norms are torch's, and round at another place.
    assert float((says(reopened(whole), texts) - want).abs().max()) < 1e-4
    assert float((says(target.model, texts) - want).abs().max()) > 1e-2
    features, _ = inputs()
    theirs = served_heads.medusa(*files(heads), K)(features)
    with torch.no_grad():
        heads = [drafter.lm_heads.head_for(j, target.head) for j in range(1, K + 1)]
        own = [head(block(features)) for head, block in zip(heads, drafter.blocks, strict=True)]
    assert gap(theirs, own) < 1e-5
