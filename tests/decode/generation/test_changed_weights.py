"""Weights changed in place: a target or drafter decodes as one that was loaded with them."""

import copy
from collections.abc import Callable

import pytest
import torch
from packing import can_pack
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from decode.generation.generate import generate, stream
from decode.kernels import packed_linear
from decode.kernels.int8_linear import round_rows
from decode.kernels.packing import pack
from decode.kernels.weight_state import notice_changes
from decode.model import causal_lm
from decode.model.abilities import Abilities
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.dflash import DSpark
from drafters.models.eagle import Eagle

PROMPTS = [[5, 9, 2, 7], [3, 11, 8]]
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _packs(monkeypatch, tmp_path):
    """Copies are kept even where they are slower; a test that needs one that torch cannot make is skipped."""

    def packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not can_pack(dtype):
            pytest.skip(f"torch cannot pack {dtype} on this processor")
        return pack(weight, dtype)

    monkeypatch.setattr(packed_linear, "pack", packed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packed_linear, "copy_range", lambda *shape: (1, packed_linear.ROWS))
    monkeypatch.setattr(packed_linear, "fp32_rows", lambda *shape: 0)


def llama(seed: int, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape))
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.3  # norms too
    return model.to(dtype)


def through_data(module: nn.Module, state: State) -> None:
    for name, weight in module.named_parameters():
        weight.data.copy_(state[name])


def with_new_parameters(module: nn.Module, state: State) -> None:
    module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


def all_but_first_layer_new(module: nn.Module, state: State) -> None:
    part = {name: value.clone() for name, value in state.items() if "q_proj" not in name}
    module.load_state_dict(part, assign=True, strict=False)


def counted(module: nn.Module, state: State) -> None:
    module.load_state_dict(state)


WAYS = [through_data, with_new_parameters, all_but_first_layer_new, counted]


def logits(target: Target) -> Tensor:
    """Of a prompt and of single tokens after it, which read copies of weights."""
    with torch.inference_mode():
        target.start(1, 16)
        out = [target.extend(torch.tensor([PROMPTS[0]])).last]
        target.keep([4])
        for token in (4, 6):
            out.append(target.extend(torch.tensor([[token]])).last)
            target.keep([1])
        return target.head(torch.cat(out, 1))


def other_state(target: Target, way: Callable[..., None]) -> tuple[State, Target]:
    """Weights to change to, and a model loaded with them."""
    new, state = llama(1, target.dtype), llama(1, target.dtype).state_dict()
    if way is all_but_first_layer_new:
        old = target.model.state_dict()
        state |= {name: old[name].clone() for name in state if "q_proj" in name}
        new.load_state_dict(state)
    return state, Target(new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_changed_target_reads_as_one_loaded_with_its_weights(way, dtype):
    target = Target(llama(0, dtype))
    before = logits(target)
    state, expected = other_state(target, way)
    way(target.model, state)
    assert not torch.equal(logits(target), before)
    assert torch.equal(logits(target), logits(expected))


def test_one_element_changed_through_data_is_seen():
    for name in ("model.norm", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj", "lm_head"):
        target = Target(llama(0))
        before = logits(target)
        weight: Tensor = target.model.get_submodule(name).weight
        weight.data.view(-1)[7] = 40.0
        assert not torch.equal(logits(target), before), name
        assert torch.equal(logits(target), logits(Target(copy.deepcopy(target.model)))), name


def streamed(target: Target) -> list[int]:
    pieces = stream(target, None, PROMPTS[0], max_new_tokens=8, sampler=Sampler())
    return [token for piece in pieces for token in piece.tokens]


def through_own_cache(target: Target) -> list[list[int]]:
    target.abilities = Abilities(own_cache=True)
    outputs = generate(target, None, PROMPTS, max_new_tokens=12, sampler=Sampler(1.0)).outputs
    return [o.tokens for o in outputs]


def rescored(target: Target) -> list[float]:
    return target.read(torch.tensor([PROMPTS[0]])).last.flatten().tolist()


@pytest.mark.parametrize("read", [streamed, through_own_cache, rescored])
def test_every_way_to_read_has_the_new_weights(monkeypatch, read):
    if read is not streamed:
        monkeypatch.setattr(packed_linear, "fp32_rows", lambda *shape: 1)
    target = Target(llama(0))
    read(target)
    through_data(target.model, llama(1).state_dict())
    assert read(target) == read(Target(llama(1)))


def test_compiled_code_is_dropped_with_the_weights_that_are_its_constants(monkeypatch):
    class Compiled:
        most = 64

        def __call__(self, *args: object) -> Tensor:
            pytest.fail("constants of other weights were read")

    monkeypatch.setattr(causal_lm, "compiled_pass", lambda fused: (Compiled(), ""))
    for dtype in (torch.bfloat16, torch.float32):
        target = Target(llama(0, dtype))
        assert target.compile() == ""
        assert isinstance(target.fused.compiled, Compiled)
        through_data(target.model, llama(1, dtype).state_dict())
        assert torch.equal(logits(target), logits(Target(llama(1, dtype))))


def drafted(target: Target, drafter: nn.Module) -> list[list[list[int]]]:
    """Texts, and how much of each draft was accepted, for drawn tokens with q."""
    target.tap(drafter.taps)
    options = {"max_new_tokens": 16, "sampler": Sampler(1.0), "plan": Plan(depth=2, proposal="sampled")}
    outputs = generate(target, drafter, PROMPTS, **options).outputs
    return [[o.tokens, o.accepted] for o in outputs]


DSPARK = {"taps": [0, 1], "layers": 1, "markov_rank": 4, "sample_from_anchor": True, "anchors": 0}
DSPARK |= {"mask_id": None, "draft_vocab_size": 20}
DRAFTERS = {"eagle": (Eagle, {"feature_noise": 0.0, "feature_weight": 1.0}), "dspark": (DSpark, DSPARK)}


def loaded(kind: str, target: Target, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    drafter_class, options = DRAFTERS[kind]
    drafter = drafter_class.for_target(target, depth=2, **options)
    for weight in drafter.parameters():
        weight.data += torch.randn_like(weight) * 0.2
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(20) + 20 * seed)
    return drafter.to(target.dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("way", [through_data, with_new_parameters])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("changed", ["drafter", "target"])
def test_changed_drafter_drafts_as_one_loaded_with_its_weights(changed, kind, way):
    target = Target(llama(0))
    drafter = loaded(kind, target, 0)
    before = drafted(target, drafter)
    if changed == "drafter":
        new = loaded(kind, target, 1)
        state = new.state_dict()
        if drafter.d2t is not None:
            drafter.d2t.data.copy_(new.d2t)
        way(drafter, state)
        expected = drafted(Target(llama(0)), new)
    else:
        way(target.model, llama(1).state_dict())
        fresh = loaded(kind, Target(llama(1)), 0)
        fresh.load_state_dict(drafter.state_dict())
        for name, buffer in drafter.named_buffers(recurse=False):  # of the target that it was made for
            setattr(fresh, name, buffer)
        expected = drafted(Target(llama(1)), fresh)
    assert drafted(target, drafter) == expected != before


def test_int8_numbers_of_changed_weights_are_not_used(monkeypatch):
    monkeypatch.setattr(packed_linear, "int8_rows", lambda *shape: 4)
    layer = packed_linear.Linear(16, 24, bias=False).bfloat16().requires_grad_(False)
    round_rows(layer.weight)
    x = torch.randn(2, 16).bfloat16()
    with torch.inference_mode():
        layer(x)
        layer.weight.data.neg_()
        notice_changes()
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
