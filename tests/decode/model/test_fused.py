"""The few-call forward pass of Llama-like models against transformers' own."""

import copy

import pytest
import torch
from families import BASE, PROMPTS, WORKS
from transformers import AutoConfig, AutoModelForCausalLM

from decode.draft import Draft
from decode.model import compiled_forward
from decode.model.causal_lm import CausalLM
from decode.model.fused_forward import Fused
from decode.model.load import load_model

SAME = ("llama", "llama tied, biased", "qwen2", "qwen3", "mistral, window 6", "mistral, no window")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
FUSED = {name: WORKS[name] for name in SAME} | {
    "llama, mlp biased, gelu": ("llama", BASE | {"mlp_bias": True, "hidden_act": "gelu"}),
    "llama, one head a key": ("llama", BASE | {"num_key_value_heads": BASE["num_attention_heads"]}),
    "llama, yarn": ("llama", BASE | {"rope_parameters": YARN}),
}
ROUNDING = 2e-6  # of fp32, on rows of size one


def frozen(name, table=FUSED):
    kind, shape, *_ = table[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)  # norms and biases too
    return model.eval().requires_grad_(False)


def body(lm):
    return Fused.of(lm.base, lm.layers, lm.config)


@torch.inference_mode()
def passes(lm):
    """Heads' and layers' inputs, of a ragged prompt, a tree, a compaction, a scratch read and one prompt."""
    found = []

    def forward(*inputs, **more):
        taps = {0: torch.empty(0), 1: torch.empty(0)}
        last = lm.forward(*inputs, **more, inputs=taps)
        found.append(torch.stack([last, taps[0], taps[1]]))

    lm.start(2, 16)
    forward(torch.tensor([[5, 9, 2, 7, 3, 11, 8], [4, 6, 10, 0, 0, 0, 0]]))
    found[0] = found[0][:, :, :3]  # the rest of the second row is padding
    lm.keep([7, 3])
    nodes = torch.tensor([[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]])
    parents = torch.tensor([[-1, -1, 0, 1, 2], [-1, 0, 0, 1, 3]])
    forward(torch.cat([torch.tensor([[22], [23]]), nodes], 1), Draft(nodes, parents, depth=4).ancestors())
    lm.keep([4, 3], torch.tensor([[0, 1, 3, 5], [0, 1, 3, 0]]))
    forward(torch.tensor([[24], [25]]))
    lm.select([0])
    lm.keep([1])
    forward(torch.tensor([[26]]))
    forward(torch.tensor([[27, 28]]), scratch=1)
    lm.start(1, 16)
    forward(torch.tensor([PROMPTS[0]]))  # needs no mask
    return found


def check_passes(found, expected, atol):
    for got, want in zip(found, expected, strict=True):
        want = want.double()
        scale = want.abs().amax((-1, -2), keepdim=True).amax(1, keepdim=True)
        torch.testing.assert_close(got.double() / scale, want / scale, rtol=0, atol=atol)


@pytest.mark.parametrize("name", FUSED)
def test_fused_pass_computes_what_transformers_does(name, monkeypatch):
    """In fp32, against transformers' own pass in float64: two fp32 passes differ by both their roundings."""
    lm = CausalLM(frozen(name))
    fused = passes(lm)
    assert lm._fused is not None
    monkeypatch.setattr(Fused, "of", lambda *_: None)
    check_passes(fused, passes(CausalLM(frozen(name).double())), ROUNDING)


def test_fused_weights_are_held_once():
    model = frozen("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lm = CausalLM(model)
    fused = body(lm)
    for layer, made in zip(lm.layers, fused.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        stacked = {attention.q_proj: made.qkv, attention.v_proj: made.qkv}
        for part, whole in (stacked | {mlp.up_proj: made.gate_up, mlp.down_proj: made.down}).items():
            assert part.weight.untyped_storage().data_ptr() == whole.weight.untyped_storage().data_ptr()
    assert all(model.state_dict()[name].equal(weight) for name, weight in before.items())
    assert body(lm) is fused


def test_fused_model_is_saved_as_it_was_and_loads_fused(tmp_path):
    model = frozen("qwen3")
    passes(CausalLM(model))
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path)).requires_grad_(False)
    assert all(again.state_dict()[name].equal(weight) for name, weight in model.state_dict().items())
    assert body(CausalLM(again)) is not None


def trainable(model):
    model.requires_grad_(True)


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def dispatched(model):
    """As accelerate does it."""
    layer = model.model.layers[0]
    layer.forward = copy.copy(layer.forward)


def adapted(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    model.requires_grad_(False)


def eager(model):
    model.config._attn_implementation = "eager"


def wide(model):
    """In fp64 transformers' norms still round to fp32, and the numbers asked for are theirs."""
    model.double()


@pytest.mark.parametrize(
    "change", [trainable, hooked, dispatched, adapted, eager, wide], ids=lambda f: f.__name__
)
def test_altered_model_runs_its_own_code(change):
    model = frozen("llama")
    assert body(CausalLM(model)) is not None
    change(model)
    assert body(CausalLM(model)) is None


def test_other_classes_run_their_own_code():
    """Also a Llama with angles that depend on the length."""
    others = set(WORKS) - set(FUSED)
    assert [name for name in others if body(CausalLM(frozen(name, WORKS))) is not None] == []


COMPILED = [(torch.float32, name) for name in FUSED]
COMPILED += [(torch.bfloat16, name) for name in ("llama tied, biased", "qwen3", "mistral, window 6")]


@pytest.mark.parametrize(("dtype", "name"), COMPILED)
@pytest.mark.proof  # tests/lab/test_benchmark.py compiles in CI
def test_compiled_pass_computes_what_the_fused_one_does(name, dtype, monkeypatch, tmp_path):
    """The code is found again for the same weights, and compiled again where its file is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lm = CausalLM(frozen(name).to(dtype))
    plain = passes(lm)
    assert lm.compile() == ""
    files = sorted(file.suffix for file in (tmp_path / "foredraft" / "compiled").iterdir())
    assert files == [".lock", ".pt2"]
    found = passes(lm)
    assert body(lm).compiled is not None
    check_passes(found, plain, ROUNDING if dtype == torch.float32 else 0.05)
    written = []
    monkeypatch.setattr(compiled_forward, "_write", lambda _, file: written.append(file))
    same = CausalLM(frozen(name).to(dtype))
    assert same.compile() == ""
    assert written == []
    next(same.base.parameters()).mul_(2)
    body(same).layers[0].down.weight.mul_(2)
    assert "cannot be read" in same.compile()
    assert body(same).compiled is None
    assert len(written) == 1
    for file in written[0].parent.glob("*.pt2"):
        file.write_bytes(file.read_bytes()[:1000])
    assert "cannot be read" in CausalLM(frozen(name).to(dtype)).compile()
    assert len(written) == 2


def test_model_that_cannot_be_compiled_runs_fused(monkeypatch):
    lm = CausalLM(frozen("llama"))
    plain = passes(lm)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert lm.compile() == "no C++ compiler (/nowhere/g++); install one or set CXX"

    def wrong(x, angles, mask, index, parts):
        del angles, mask, index, parts
        return [x] * 3

    monkeypatch.setattr(compiled_forward, "_read", lambda _: wrong)
    assert "passes differ by" in lm.compile()
    monkeypatch.setattr(compiled_forward, "_read", lambda _: 1 / 0)
    assert lm.compile() == "the compiler failed (division by zero)"
    for got, want in zip(passes(lm), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    trainable(lm.model)
    assert "no forward pass that can be compiled" in lm.compile()
