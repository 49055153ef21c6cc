"""MTP heads: read from a target's files by each vendor's names, arranged, and exported."""

from __future__ import annotations

import json

import pytest
import torch
from drafter_checks import K, V, batch_of, random_texts
from safetensors.torch import save_file
from served_mtp import ServedMtp, drafted, speculators_layout
from workbench import same

from decode.errors import UserError
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.hf.mtp_weights import KNOWN, Arrangement, final_norm, native
from drafters.models.mtp import Mtp

# Kind: family of names, model_type of the target, options of its layer.
KINDS = {
    "mimo": ("mimo", "mimo", {"qkv_bias": True}),
    "qwen": ("qwen", "qwen3_5_text", {"gate": True, "qk_norm": True, "zero_centred": True}),
    "deepseek": ("deepseek", "deepseek_v3", {}),
    "glm": ("deepseek", "glm4_moe", {"qkv_bias": True, "qk_norm": True}),
}
UNASKED = {"path": None, "draft_vocab_size": None} | dict.fromkeys(Arrangement._fields)


@pytest.fixture
def vendor(tiny_target, make_drafter, tmp_path):
    """Makes a target of a kind whose folder has a random MTP head, that head, and its tensors on file."""

    def make(kind: str):
        family, model_type, options = KINDS[kind]
        target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float64)
        if options.get("zero_centred"):
            target.model.model.norm.forward = zero_centred(target.model.model.norm)
        arrangement = KNOWN[model_type]._asdict()
        head = make_drafter("mtp", target, depth=K, family=family, **arrangement, **options)
        head.float().double()  # a trained one is in fp32
        tensors = native(checkpoint_io.as_saved(head).weights, head.settings, len(target.layers))
        target.config.model_type = model_type
        return target, head, put(target, tensors, tmp_path)

    return make


def zero_centred(norm):
    def forward(x):
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (1 + norm.weight)

    return forward


def put(target, tensors, folder):
    """Write a target's folder in two files, the head in the second, and let the target name it."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    files = {"model-1.safetensors": {"model.norm.weight": torch.ones(16)}, "model-2.safetensors": tensors}
    for name, part in files.items():
        save_file(part, folder / name)
    places = {tensor: name for name, part in files.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    target.model.name_or_path = str(folder)
    return tensors


@torch.no_grad()
def logits_of(drafter, target, texts=None):
    target.tap(drafter.taps)
    batch = batch_of(target, random_texts() if texts is None else texts)
    return [(step, step.head(step.hidden)) for step in drafter.unroll(batch, target)]


@pytest.mark.parametrize("kind", KINDS)
def test_head_on_file_is_read_bit_for_bit(vendor, kind):
    target, head, tensors = vendor(kind)
    read = Mtp.for_target(target, depth=K, **UNASKED).eval().to(target.dtype)
    assert read.settings == head.settings
    assert not read.undecided
    pairs = zip(logits_of(head, target), logits_of(read, target), strict=True)
    assert all(one[1].equal(other[1]) for one, other in pairs)
    assert same(native(checkpoint_io.as_saved(read).weights, read.settings, len(target.layers)), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_vllms_class(vendor, kind):
    target, head, tensors = vendor(kind)
    config = {"num_attention_heads": 2, "head_dim": 8, "hidden_size": 16, "rms_norm_eps": 1e-6}
    served = ServedMtp(tensors, kind, config, target)
    texts = random_texts(rows=3, length=9)
    last: list[torch.Tensor] = []
    norm = target.model.model.norm  # what enters it is what MiMo hands on
    hook = norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    read = target.read(texts)
    hook.remove()
    theirs = drafted(served, texts, last[0] if kind == "mimo" else read.last, K)
    for step, ours in logits_of(head, target, texts):
        row, anchor = step.anchor // 9, step.anchor % 9
        other = torch.stack([theirs[int(a), step.depth][r] for r, a in zip(row, anchor, strict=True)])
        # MiMo's state before the norm is the one behind it without its scale: eps is added twice.
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-5 if kind == "mimo" else 1e-8)
    assert not served.left


ORDERS = [Arrangement(True, True, True), Arrangement(False, False, True), Arrangement(False, True, False)]


@pytest.mark.parametrize("order", ORDERS)
def test_unknown_arrangement_is_found_by_scoring(tiny_target, tmp_path, order):
    """A head that was fitted to its target predicts it only if it is read as it was written."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    with torch.no_grad():
        target.model.model.norm.weight.uniform_(0.2, 3)
    head = Mtp.for_target(target, depth=2, **UNASKED | order._asdict()).train()
    texts = random_texts(rows=2, length=48)
    batch, optimizer = batch_of(target, texts), torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(60):
        losses = []
        for step in head.unroll(batch, target):
            wanted = target.head(batch.last.flatten(0, 1)[step.anchor + step.depth]).argmax(-1)
            losses.append(torch.nn.functional.cross_entropy(step.head(step.hidden), wanted))
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    put(target, native(checkpoint_io.as_saved(head).weights, head.settings, 4), tmp_path)  # in MiMo's names
    read = Mtp.for_target(target, depth=K, **UNASKED)
    assert read.undecided
    assert read.needs_fit
    line = read.fit([Text(row, [1] * len(row)) for row in texts.tolist()], target)
    assert "its arrangement is unknown" in line
    assert {name: read.settings[name] for name in order._fields} == order._asdict()
    assert logits_of(read, target)[0][1].equal(logits_of(head, target)[0][1])


REFUSED = [  # a tensor that is added, or left out
    ("deepseek", "layers.4.mlp.experts.0.up_proj.weight", "mixture of experts"),
    ("deepseek", "layers.4.self_attn.kv_a_proj_with_mqa.weight", "latent attention"),
    (
        "deepseek",
        "layers.4.post_mlp_layernorm.weight",
        "1 tensors .* not supported, post_mlp_layernorm.weight",
    ),
    ("mimo", "mtp_layers.1.input_proj.weight", "several MTP layers"),
    ("mimo", "mtp_layers.0.mlp.up_proj.weight", r"has no mlp\.up_proj\.weight"),
]


@pytest.mark.parametrize(("kind", "name", "said"), REFUSED)
def test_head_that_cannot_be_trained_is_refused(vendor, tmp_path, kind, name, said):
    target, _, tensors = vendor(kind)
    if tensors.pop(f"model.{name}", None) is None:
        tensors[f"model.{name}"] = torch.ones(16)
    put(target, tensors, tmp_path)
    with pytest.raises(UserError, match=said):
        Mtp.for_target(target, depth=K, **UNASKED)
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="no MTP head in its"):
        Mtp.for_target(target, depth=K, **UNASKED | {"path": str(tmp_path / "other")})


def test_copies_of_embedding_and_head_are_ignored(vendor, tmp_path):
    target, head, tensors = vendor("deepseek")
    copies = dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), torch.ones(V, 16))
    put(target, tensors | {f"model.layers.4.{name}": copy.clone() for name, copy in copies.items()}, tmp_path)
    read = Mtp.for_target(target, depth=K, **UNASKED)
    assert all(weight.double().equal(head.state_dict()[name]) for name, weight in read.state_dict().items())


@pytest.mark.parametrize("before_norm", [False, True])
def test_new_head_starts_with_the_targets_state(tiny_target, before_norm):
    """As EAGLE does: with nothing of the token it repeats the target's distribution."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    with torch.no_grad():
        target.model.model.norm.weight.uniform_(0.5, 2)
        head = Mtp.for_target(target, depth=1, **UNASKED | {"before_norm": before_norm}).double()
        head.fc.weight.copy_(torch.cat([torch.eye(16), torch.zeros(16, 16)], 1))
    texts = random_texts()
    (step, logits), *_ = logits_of(head, target, texts)
    target_logits = target.head(target.read(texts).last.flatten(0, 1)[step.anchor])
    if before_norm:
        torch.testing.assert_close(logits, target_logits, rtol=1e-5, atol=1e-5)
    else:  # up to the state's size
        assert torch.nn.functional.cosine_similarity(logits, target_logits, dim=-1).min() > 1 - 1e-6


def test_final_norm_tells_its_scale(tiny_target):
    target = tiny_target(vocab=V, hidden=16)
    norm = target.model.model.norm
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    assert not final_norm(target).zero_centred
    torch.testing.assert_close(final_norm(target).scale, norm.weight)
    norm.forward = zero_centred(norm)
    assert final_norm(target).zero_centred
    torch.testing.assert_close(final_norm(target).scale, 1 + norm.weight)
    target.model.model.norm = torch.nn.LayerNorm(16).double()
    assert final_norm(target) is None
    with pytest.raises(UserError, match="no RMS norm"):
        Mtp.for_target(target, depth=1, **UNASKED | {"before_norm": True})


def written(drafter, target):
    return formats.write_layout(checkpoint_io.as_saved(drafter), target, "vllm")


def test_export_of_a_new_head_has_mimos_names(tiny_target, make_drafter, tmp_path):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("mtp", target)
    layout = written(drafter, target)
    assert layout.config["architectures"] == ["MiMoForCausalLM"]
    assert all(name.startswith("model.mtp_layers.0.") for name in layout.tensors)
    assert not layout.tensors["model.mtp_layers.0.self_attn.k_proj.bias"].any()
    assert """--hf-overrides '{"num_nextn_predict_layers": 1}'""" in layout.command("T", "D")
    layout.write(tmp_path)
    back = checkpoint_io.load(tmp_path, target)
    assert back.settings | {"depth": drafter.depth} == drafter.settings | {"family": "mimo"}
    assert same(back.state_dict(), drafter.state_dict())


@pytest.mark.parametrize("kind", ["mimo", "qwen"])
def test_export_of_the_targets_head_comes_back(vendor, kind, tmp_path):
    target, head, tensors = vendor(kind)
    if kind == "mimo":
        target.model.config.architectures = ["MiMoForCausalLM"]
    target.config.num_nextn_predict_layers = 1
    layout, folder = written(head, target), tmp_path / "export"
    assert layout.tensors.keys() == tensors.keys()
    folder.mkdir()
    layout.write(folder)
    back = checkpoint_io.load(folder, target)
    assert back.settings | {"depth": K, "draft_vocab_size": None} == head.settings
    assert same(back.state_dict(), head.state_dict())


TRAINED = {"hidden_first": False, "before_norm": True, "norm_output": True, "family": "qwen"}
LAYERS = {
    "qwen3": {"qk_norm": True},
    "qwen3_5_text": {"qk_norm": True, "gate": True, "zero_centred": True},
}


@pytest.fixture
def of_speculators(tiny_target, make_drafter):
    """Makes a target, a head whose layer is of a model_type, and speculators' folder of it."""

    def make(kind: str):
        target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float64)
        with torch.no_grad():
            target.model.model.norm.weight.uniform_(0.5, 2)
        if LAYERS[kind].get("zero_centred"):
            target.model.model.norm.forward = zero_centred(target.model.model.norm)
        head = make_drafter("mtp", target, depth=K, **TRAINED, **LAYERS[kind])
        tensors = native(checkpoint_io.as_saved(head).weights, head.settings, 4)
        sizes = {"hidden_size": 16, "vocab_size": V, "intermediate_size": head.settings["intermediate_size"]}
        heads = {"num_attention_heads": 2, "num_key_value_heads": head.settings["kv_heads"], "head_dim": 8}
        theta = {"rope_type": "default", "rope_theta": head.settings["rope_theta"]}
        theta = {"rope_parameters": theta | {"partial_rotary_factor": 1.0}}
        more = {"model_type": kind, "num_hidden_layers": 4, "rms_norm_eps": head.settings["eps"]}
        return target, head, speculators_layout(tensors, sizes | heads | theta | more, "some/target", K)

    return make


@pytest.mark.parametrize("kind", LAYERS)
def test_head_of_speculators_is_read_as_it_was_trained(of_speculators, kind, tmp_path):
    """On the state before the target's final norm."""
    target, head, layout = of_speculators(kind)
    layout.write(tmp_path)
    back = checkpoint_io.load(tmp_path, target)
    assert back.settings == head.settings
    assert back.state_dict().keys() == head.state_dict().keys()
    config = layout.config["transformer_layer_config"]
    served = ServedMtp(layout.tensors, "speculators", config, target, LAYERS[kind].get("zero_centred", False))
    texts = random_texts(rows=3, length=9)
    last: list[torch.Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    target.read(texts)
    hook.remove()
    theirs = drafted(served, texts, last[0], K)
    for step, ours in logits_of(back, target, texts):
        row, anchor = step.anchor // 9, step.anchor % 9
        other = torch.stack([theirs[int(a), step.depth][r] for r, a in zip(row, anchor, strict=True)])
        torch.testing.assert_close(ours.double(), other, rtol=0, atol=1e-5)
    assert not served.left
    with pytest.raises(UserError, match=r"drafter\.before_norm=true|order of inputs is unknown"):
        written(back, target)
    del config["rope_parameters"]["partial_rotary_factor"]  # as transformers reads it
    layout.write(tmp_path)
    rope = checkpoint_io.load(tmp_path, target).settings["rope"] or {}
    assert rope.get("partial_rotary_factor") == {"qwen3": None, "qwen3_5_text": 0.25}[kind]


NO_HEAD = {
    "mixture of experts": {"mtp_layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)},
    "several MTP layers": {"mtp_layers.1.input_proj.weight": torch.ones(16, 32)},
    "1 tensors have no place .* markov": {"markov.weight": torch.ones(2)},
    "it has its own lm_head.weight": {"lm_head.weight": torch.ones(V, 16)},
    "no MTP head among its tensors": {"mtp_layers.0.input_proj.weight": None},
}


@pytest.mark.parametrize("said", NO_HEAD)
def test_other_head_of_speculators_is_refused(of_speculators, said, tmp_path):
    target, _, layout = of_speculators("qwen3")
    tensors = {k: v for k, v in (layout.tensors | NO_HEAD[said]).items() if v is not None}
    layout._replace(tensors=tensors).write(tmp_path)
    with pytest.raises(UserError, match=said):
        checkpoint_io.load(tmp_path, target)


def test_dense_deepseek_head_is_refused(vendor):
    target, head, _ = vendor("deepseek")
    with pytest.raises(UserError, match=r"experts or latent attention.*set to=native"):
        written(head, target)


LACKING = {"hidden_first": False, "before_norm": True, "norm_output": False, "qk_norm": True}
LACKING |= {"intermediate_size": 24}


@pytest.mark.parametrize("option", LACKING)
def test_options_vllm_lacks_are_refused(tiny_target, make_drafter, option):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    with pytest.raises(UserError, match=option):
        written(make_drafter("mtp", target, **{option: LACKING[option]}), target)
