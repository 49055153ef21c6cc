"""Ninety folders, each with one change: the same model and text, or one line."""

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
CASES = 10  # of each mutation
TOKENS = torch.arange(4, 30)[None]
MESSAGES = [{"role": "user", "content": "It's 12 o'clock\n"}]
# Parts of names of tensors, and others in their place
RENAMES = [("", "model."), ("model.", ""), ("", "base_model.model."), ("layers", "h"), (".1.", ".7.")]
RENAMES += [("weight", "base_layer.weight"), ("proj", "lin"), ("weight", "gamma"), ("weight", "bias")]


def change_tensors(folder: Path, rng: random.Random, change: Callable[[dict, str], Any]) -> None:
    values = load_file(folder / WEIGHTS)
    change(values, rng.choice(sorted(values)))
    save_file(values, folder / WEIGHTS, {"format": "pt"})


def change_keys(folder: Path, rng: random.Random, change: Callable[[dict, str], Any]) -> None:
    values = json.loads((folder / CONFIG).read_text())
    change(values, rng.choice(sorted(values)))
    (folder / CONFIG).write_text(json.dumps(values))


def change_tensor(folder: Path, rng: random.Random) -> None:
    changes: list[Any] = [lambda w: w[:-1].clone(), lambda w: w[None].clone()]
    changes += [lambda w, kind=kind: w.to(kind) for kind in (torch.int32, torch.float8_e4m3fn, torch.float64)]
    how = rng.choice(changes)
    change_tensors(folder, rng, lambda t, name: t.update({name: how(t[name])}))


def rename_tensor(folder: Path, rng: random.Random) -> None:
    part = rng.choice(RENAMES)
    change_tensors(folder, rng, lambda t, name: t.update({name.replace(*part, 1): t.pop(name)}))


def rename_key(folder: Path, rng: random.Random) -> None:
    form = rng.choice(["{}s", "text_{}", "{}_"])
    change_keys(folder, rng, lambda c, key: c.update({form.format(key): c.pop(key)}))


def break_key(folder: Path, rng: random.Random) -> None:
    value = rng.choice(["x", [], {}, -1])
    change_keys(folder, rng, lambda c, key: c.update({key: value}))


def rename_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.rename(path.with_name(rng.choice([f"old_{path.name}", f"{path.name}.bak", path.name.upper()])))


def break_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.suffix != ".jinja"])
    content = path.read_bytes()
    path.write_bytes(rng.choice([b"", b"[]", b"{}", b"\xff\xfe", content[: len(content) // 2]]))


MUTATIONS = {
    "drop_tensor": lambda folder, rng: change_tensors(folder, rng, lambda t, name: t.pop(name)),
    "rename_tensor": rename_tensor,
    "change_tensor": change_tensor,
    "drop_key": lambda folder, rng: change_keys(folder, rng, lambda c, key: c.pop(key)),
    "rename_key": rename_key,
    "break_key": break_key,
    "drop_file": lambda folder, rng: rng.choice(sorted(folder.iterdir())).unlink(),
    "rename_file": rename_file,
    "break_file": break_file,
}


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


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_changed_folder_is_the_same_model_or_one_line(mutation, whole, tmp_path, capsys):
    expected = read(whole)
    for seed in range(CASES):
        folder = tmp_path / f"{seed}"
        shutil.copytree(whole, folder)
        MUTATIONS[mutation](folder, random.Random(f"{mutation} {seed}"))
        say_once.cache_clear()
        capsys.readouterr()
        found, refusal = None, ""
        try:
            found = read(folder)
        except UserError as error:
            refusal = str(error)
        said = f"target={folder}: " in capsys.readouterr().err
        assert found == expected or said or refusal.startswith("target"), (seed, found)
        assert "\n" not in refusal, seed
