"""A hundred folders, each with one thing changed: the same model and text, or one line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from workbench import make_target

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.files.tokenizer_files import check_rows
from decode.model.load import load_config, load_target, load_tokenizer, stop_tokens

WEIGHTS, CONFIG = "model.safetensors", "config.json"
CASES = 100
TOKENS = torch.arange(4, 30)[None]
MESSAGES = [{"role": "user", "content": "It's 12 o'clock\n"}]
Mutation = Callable[[Path, random.Random], None]


def json_file(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))


def tensors(folder: Path, change: Callable[[dict], None]) -> None:
    values = load_file(folder / WEIGHTS)
    change(values)
    save_file(values, folder / WEIGHTS, {"format": "pt"})


def a_name(folder: Path, rng: random.Random) -> str:
    return rng.choice(sorted(load_file(folder / WEIGHTS)))


def add_tensor(folder: Path, rng: random.Random) -> None:
    name = a_name(folder, rng)
    layer = f"model.layers.{rng.randrange(4)}."
    new = rng.choice(
        [
            name.replace(".weight", ".bias"),
            f"model.{name}",
            name.removeprefix("model."),
            f"x.{name}",
            f"{layer}mlp.gate.weight",
            f"{layer}self_attn.q_norm.weight",
            f"{layer}self_attn.sinks",
            f"{layer}self_attn.rotary_emb.inv_freq",
            "model.norm.bias",
            "lm_head.bias",
            "mtp.fc.weight",
        ]
    )
    size = rng.choice([(32,), (4,), (32, 32)])
    tensors(
        folder, lambda t: t.setdefault(new, torch.randn(size, generator=torch.Generator().manual_seed(3)))
    )


def drop_tensor(folder: Path, rng: random.Random) -> None:
    name = a_name(folder, rng)
    tensors(folder, lambda t: t.pop(name))


def rename_tensor(folder: Path, rng: random.Random) -> None:
    name = a_name(folder, rng)
    new = rng.choice(
        [
            name.removeprefix("model."),
            f"model.{name}",
            f"base_model.model.{name}",
            name.replace("layers", "h"),
            name.replace("weight", "base_layer.weight"),
            name.replace(".1.", ".7."),
            name.replace("proj", "lin"),
            name.replace("weight", "gamma"),
        ]
    )
    tensors(folder, lambda t: t.update({new: t.pop(name)}))


def change_tensor(folder: Path, rng: random.Random) -> None:
    name = a_name(folder, rng)
    how = rng.choice(
        [
            lambda w: w[:-1].clone(),
            lambda w: w.to(torch.int32),
            lambda w: w.to(torch.float8_e4m3fn),
            lambda w: w[None].clone(),
            lambda w: w.to(torch.float64),
        ]
    )
    tensors(folder, lambda t: t.update({name: how(t[name])}))


def add_key(folder: Path, rng: random.Random) -> None:
    key, value = rng.choice(
        [
            ("sliding_window", 4),
            ("logit_scale", 0.5),
            ("rope_theta", 5e5),
            ("attn_logit_softcapping", 5.0),
            ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
            ("layer_types", ["full_attention"] * 2),
            ("quantization_config", {"quant_method": "gptq"}),
            ("transformers_weights", "x.safetensors"),
            ("unsloth_version", "2026"),
            ("use_qk_norm", True),
            ("embedding_multiplier", 2.0),
        ]
    )
    json_file(folder, CONFIG, lambda c: c.update({key: value}))


def drop_key(folder: Path, rng: random.Random) -> None:
    key = rng.choice(sorted(json.loads((folder / CONFIG).read_text())))
    json_file(folder, CONFIG, lambda c: c.pop(key))


def rename_key(folder: Path, rng: random.Random) -> None:
    key = rng.choice(sorted(json.loads((folder / CONFIG).read_text())))
    new = rng.choice([key.upper(), f"{key}s", f"text_{key}"])
    json_file(folder, CONFIG, lambda c: c.update({new: c.pop(key)}))


def break_key(folder: Path, rng: random.Random) -> None:
    key = rng.choice(sorted(json.loads((folder / CONFIG).read_text())))
    value = rng.choice(["x", [], {}, -1])
    json_file(folder, CONFIG, lambda c: c.update({key: value}))


def drop_file(folder: Path, rng: random.Random) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def rename_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.rename(path.with_name(rng.choice([f"old_{path.name}", f"{path.name}.bak", path.name.upper()])))


def break_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.suffix != ".jinja"])
    content = path.read_bytes()
    path.write_bytes(rng.choice([b"", b"[]", b"{}", b"\xff\xfe", content[: len(content) // 2]]))


def add_file(folder: Path, rng: random.Random) -> None:
    name, content = rng.choice(
        [
            ("adapter_config.json", b"{}"),
            ("adapter_model.safetensors", b""),
            ("pytorch_model.bin", b"x"),
            ("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"x": "y.safetensors"}}'),
            ("model-00001-of-00002.safetensors", b""),
            ("added_tokens.json", b'{"<|end|>": 5}'),
            ("chat_template.json", b'{"chat_template": "x"}'),
            ("special_tokens_map.json", b'{"eos_token": "a"}'),
            ("vocab.json", b'{"a": 1}'),
            ("merges.txt", b"a b"),
            ("README.md", b"x"),
        ]
    )
    (folder / name).write_bytes(content)


def change_tokenizer(folder: Path, rng: random.Random) -> None:
    changes: list[Callable[[dict], None]] = [
        lambda t: t["added_tokens"].append(t["added_tokens"][0] | {"id": 400, "content": "<|new|>"}),
        lambda t: t["model"]["vocab"].update({"new": 999}),
        lambda t: t.update({"normalizer": None}),
        lambda t: t["added_tokens"].pop(),
    ]
    json_file(folder, "tokenizer.json", rng.choice(changes))


def change_settings(folder: Path, rng: random.Random) -> None:
    change = rng.choice(
        [
            {"tokenizer_class": "Qwen2Tokenizer"},
            {"chat_template": "x"},
            {"added_tokens_decoder": {"9": {"content": "<|end|>", "special": True}}},
        ]
    )
    json_file(folder, "tokenizer_config.json", lambda t: t.update(change))


def change_generation(folder: Path, rng: random.Random) -> None:
    change = rng.choice(
        [
            {"repetition_penalty": 1.2},
            {"suppress_tokens": [4]},
            {"eos_token_id": "3"},
            {"frobnicate": 1},
            {"eos_token_id": [3, 9999]},
            {"forced_eos_token_id": 3},
        ]
    )
    json_file(folder, "generation_config.json", lambda t: t.update(change))


MUTATIONS: list[Mutation] = [
    add_tensor,
    drop_tensor,
    rename_tensor,
    change_tensor,
    add_key,
    drop_key,
    rename_key,
    break_key,
    drop_file,
    rename_file,
    break_file,
    add_file,
    change_tokenizer,
    change_settings,
    change_generation,
]


def read(folder: Path):
    """What decoding depends on: logits, the ids of a prompt, and the ends of an answer."""
    config, tokenizer = load_config(str(folder)), load_tokenizer(str(folder))
    check_rows(tokenizer, config.get_text_config().vocab_size, f"target={folder}")
    if not tokenizer.chat_template:
        raise UserError("target: its tokenizer has no chat template")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    target = load_target(str(folder), dtype="float32")
    with torch.no_grad():
        logits = target.model(input_ids=TOKENS).logits
    return logits.tolist(), prompt, [*stop_tokens(target), tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_changed_folder_is_the_same_model_or_one_line(mutation, whole, tmp_path, capsys):
    expected = read(whole)
    for seed in range(-(-CASES // len(MUTATIONS))):
        folder = tmp_path / f"{seed}"
        shutil.copytree(whole, folder)
        mutation(folder, random.Random(f"{mutation.__name__} {seed}"))
        say_once.cache_clear()
        capsys.readouterr()
        found, refusal = outcome(folder)
        said = [line for line in capsys.readouterr().err.splitlines() if f"target={folder}: " in line]
        assert found == expected or said or refusal.startswith("target"), (seed, found)
        assert "\n" not in refusal, seed


def outcome(folder: Path) -> tuple[Any, str]:
    """What was read, and the one line that refused it."""
    try:
        return read(folder), ""
    except UserError as error:
        return None, str(error)
