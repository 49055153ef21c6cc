"""A valid GGUF file, changed in one place: the same model, another one that shows the change, or one line."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ggufs import F32, settings, tiny_llama, vocabulary, weights, write_gguf
from torch import Tensor

from decode.errors import UserError
from decode.model import gguf
from decode.model.load import load_model, load_tokenizer

MODEL = tiny_llama(1, tie_word_embeddings=False)
KEYS = {"general.name": "tiny", "general.architecture": "llama"}
KEYS |= settings(MODEL, "llama") | vocabulary() | {"tokenizer.ggml.eot_token_id": 0}
TENSORS = weights(MODEL, "llama")
TEXTS = ["hi 12", "  5\n5 <|im_end|>a", "Grüße"]
ADDED_KEYS: dict[str, Any] = {
    f"llama.{name}": value
    for name, value in {
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.sliding_window": 16,
        "attention.causal": False,
        "attention.clamp_kqv": 2.0,
        "attention.temperature_scale": 0.5,
        "expert_weights_scale": 2.5,
        "embedding_scale": 12.0,
        "logit_scale": 0.5,
        "residual_scale": 0.2,
        "leading_dense_block_count": 1,
        "pooling_type": 3,
    }.items()
}
ADDED_KEYS |= {"llama.expert_count": 8, "llama.nextn_predict_layers": 1, "llama.no_such_setting": 3}
ADDED_KEYS |= {"llama.attn_logit_softcapping": 50.0, "llama.attention.value_length": 8, "xielu.eps": 0.5}
ADDED_KEYS |= {"qwen2.block_count": 2, "tokenizer.ggml.suppress_tokens": [1]}
ADDED_KEYS |= {"tokenizer.ggml.normalizer.lowercase": True, "tokenizer.ggml.add_sep_token": True}
ADDED_KEYS |= {"tokenizer.chat_template.tool_use": "{{ tools }}", "clip.has_vision_encoder": True}
ADDED_KEYS |= {"diffusion.shift_logits": True, "imatrix.chunk_count": 4, "unheard": 1, "unheard.of": [1, 2]}
ADDED_TENSORS: dict[str, tuple[int, ...]] = {"rope_freqs.weight": (8,), "rope_factors_long.weight": (8,)}
ADDED_TENSORS |= {"output.bias": (261,), "token_embd_norm.weight": (64,), "unheard": (64,)}
ADDED_TENSORS |= {"blk.0.attn_q.bias": (64,), "blk.0.attn_q_norm.weight": (16,)}
ADDED_TENSORS |= {"blk.0.attn_sinks.weight": (4,), "blk.0.attn_norm.bias": (64,)}
ADDED_TENSORS |= {"blk.0.attn_output.scale": (1,), "blk.0.ffn_gate_inp.weight": (4, 64)}
ADDED_TENSORS |= {"blk.1.ffn_up.weight": (64, 64), "blk.7.ffn_up.weight": (64, 64)}
ADDED_TENSORS |= {"v.blk.0.attn_q.weight": (64, 64), "blk.0.nextn.eh_proj.weight": (64, 128)}


class Case(NamedTuple):
    """One change of the file: keys and tensors in place of its own."""

    name: str
    keys: Mapping[str, Any] = MappingProxyType({})
    tensors: Mapping[str, Any] = MappingProxyType({})
    kind: str = "other"


def changed(value: Any) -> Iterator[Any]:
    """Other values of a key."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {0, value + 1} - {value}
    elif isinstance(value, float):
        yield from (2 * value, float("nan"))
    elif isinstance(value, str):
        yield value + "x"
    else:
        yield value[:-1]
        yield [value[-1], *value[1:-1], value[0]]
    yield 7 if isinstance(value, str | list) else "7"


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(0)
    for name, value in KEYS.items():
        if name != "general.architecture":
            yield Case(f"drop {name}", {name: None}, kind="same")
            yield Case(f"rename {name}", {name: None, f"{name}_": value}, kind="same")
        for at, other in enumerate(changed(value)):
            if name != "general.architecture" or isinstance(other, str):  # the writer takes no other
                yield Case(f"change {name} {at}", {name: other})
    yield Case("add llama.rope.scaling.factor", {"llama.rope.scaling.factor": 4.0})
    yield from (Case(f"add {name}", {name: value}, kind="same") for name, value in ADDED_KEYS.items())
    for name, value in TENSORS.items():
        yield Case(f"drop {name}", tensors={name: None}, kind="same")
        yield Case(f"rename {name}", tensors={name: None, name.replace(".w", "_.w"): value}, kind="same")
        yield Case(f"cut {name}", tensors={name: value[..., :-32]}, kind="same")
    yield Case("change output.weight", tensors={"output.weight": TENSORS["output.weight"] + 1})
    for name, shape in ADDED_TENSORS.items():
        yield Case(f"add {name}", tensors={name: generator.standard_normal(shape)}, kind="same")


class Seen(NamedTuple):
    """What a model does: logits, ids of texts and of a chat, its ends, and all its settings."""

    logits: Tensor
    ids: list[list[int]]
    chat: list[int]
    ends: Any
    settings: dict[str, Any]


def look(path: Path) -> Seen:
    model, tokenizer = load_model(str(path)).eval(), load_tokenizer(str(path))
    with torch.no_grad():
        values = model(torch.tensor([[1, 67, 68, 2, 200, 260, 0, 5]])).logits
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    said = [{"role": "user", "content": "a"}]
    chat = tokenizer.apply_chat_template(said, return_dict=False) if tokenizer.chat_template else []
    about = {name: value for name, value in model.config.to_dict().items() if name[0] != "_"}
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    about |= {"tokenizer": saved, "template": tokenizer.chat_template}
    about |= {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    return Seen(values, ids, chat, model.generation_config.eos_token_id, about)


@pytest.fixture
def check(tmp_path, monkeypatch, capsys) -> Callable[[Case], str]:
    """How a changed file ends: `same`, `shown`, `named` or `refused`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = look(write_gguf(tmp_path / "base.gguf", MODEL, F32, keys=KEYS))

    def end_of(case: Case) -> str:
        path = write_gguf(tmp_path / "m.gguf", MODEL, F32, keys={**KEYS, **case.keys}, tensors=case.tensors)
        capsys.readouterr()
        try:
            seen = look(path)
        except UserError as error:
            line = str(error)
            return "refused" if line.startswith(f"target={path}: ") and "\n" not in line else line
        line = f"target={path}: GGUF: "
        if line in capsys.readouterr().err:
            return "named"
        same = torch.equal(seen.logits, base.logits) and seen[1:4] == base[1:4]
        if same and (case.kind == "same" or seen.settings == base.settings):
            account = gguf.account_of(gguf.converted(path)[0])
            harmless = {name for names in account.harmless.values() for name in names}
            return "same" if case.kind == "same" or harmless & case.keys.keys() else "silent"
        return "shown" if case.kind == "other" else "another model"

    return end_of


# What a file may leave out: llama.cpp takes the same value, or the model does without.
MAY_LACK = {"general.name", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", "llama.vocab_size"}
MAY_LACK |= {"llama.attention.key_length", "llama.rope.freq_base", "llama.rope.dimension_count"}
# Without these it is a whole file of another model: of no template, of one end less, of a tied head.
LESS = {"tokenizer.chat_template", "output.weight"}
LESS |= {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}


def test_no_change_of_a_file_is_passed_over(check):
    ends = {case.name: check(case) for case in cases()}
    wrong = {name: end for name, end in ends.items() if end not in ("same", "shown", "named", "refused")}
    assert wrong == {f"drop {name}": "another model" for name in LESS}
    kept = {name.split()[1] for name, end in ends.items() if name.startswith("drop") and end == "same"}
    assert kept <= MAY_LACK
    assert len(ends) > 120
    assert not {name for name, end in ends.items() if name.startswith("cut") and end != "refused"}
    assert not {name for name, end in ends.items() if name.startswith("add") and end == "same"}
