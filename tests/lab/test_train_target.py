"""scripts/lab/train_target.py: from a folder of text to a model folder that can be drafted for."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from workbench import CONF, ROOT, same

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target, stop_tokens
from decode.sampling import Sampler
from distill.config.compose import compose
from distill.distributed.graceful_shutdown import Stopped
from distill.prompts.chat_template import Chat
from train_target.corpus import hold_out, pack, read_corpus, train_tokenizer
from train_target.module import PretrainModule, Saver, Sequences
from train_target.train import build_model, pretrain

POCKET = ROOT / "data" / "pocket"
TINY = (
    "vocab_size=300 model.layers=2 model.hidden_size=32 model.heads=2 model.kv_heads=1 "
    "model.intermediate_size=48 model.context=64 seq_length=48 batch_size=4 val_share=0.1 "
    "trainer.max_steps=24 every=12 trainer.log_every_n_steps=1 trainer.enable_progress_bar=false"
)


def write_text(folder: Path) -> None:
    dice = random.Random(0)
    folder.mkdir()

    def thing() -> str:
        return dice.choice(["a red hat", "two blue cups", "the old map", "one green pear"])

    chats = [
        chat(f"Where is {thing()} of room {n}?", f"It is in the {dice.choice(['box', 'bag', 'attic'])}.")
        for n in range(120)
    ]
    notes = [f"Note {n}: keep {thing()} dry, and warm." for n in range(80)]
    for name, key, values in (("chats", "messages", chats), ("notes", "text", notes)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    (folder / "story.txt").write_text("\n\n".join(f"Day {n}. {thing()} was lost." for n in range(4000)))
    (folder / "readme.md").write_text("not read")


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(texts)]


def train(root: Path, name: str, *overrides: str) -> Path:
    out, run = root / name, root / f"run-{name}"
    words = [f"data='{root}/text'", f"out='{out}'", *TINY.split(), *overrides]
    run.mkdir(exist_ok=True)
    pretrain(compose(words, CONF, "lab/train_target"), run)
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train_target")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def model(root):
    return train(root, "model")


def column(folder: Path, name: str) -> list[float]:
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    return [float(row[name]) for row in rows if row.get(name)]


def test_the_folder_loads_generates_and_is_not_overwritten(model):
    target = load_target(str(model))
    assert next(target.model.parameters()).dtype == torch.bfloat16
    assert stop_tokens(target) == [3]
    assert target.config.max_position_embeddings == 64
    prompt = Chat(AutoTokenizer.from_pretrained(model)).encode([{"role": "user", "content": "Where?"}])
    (output,) = generate(target, None, [prompt], sampler=Sampler(), max_new_tokens=8, stop=[3]).outputs
    assert 1 <= len(output.tokens) <= 8
    assert max(output.tokens) < 300
    assert not list(model.parent.glob("*.tmp"))
    before = (model / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        train(model.parent, "model")
    assert (model / "model.safetensors").read_bytes() == before


def test_the_loss_falls(root, model):
    losses = column(root / "run-model", "train/loss")
    assert len(losses) == 24
    assert losses[0] == pytest.approx(math.log(300), abs=0.2)
    assert np.mean(losses[-4:]) < losses[0] - 1
    held = column(root / "run-model", "val/loss")
    assert len(held) == 2, "one at each save point"
    assert held[1] < held[0]


def test_the_losses_are_nats_per_token(root, model):
    """Rescored without Lightning, autocast or batches."""
    _, held = hold_out(read_corpus(root / "text"), 0.1)
    record = json.loads((model / "training.json").read_text())
    assert record["val_nll"].keys() == {"chats.jsonl", "notes.jsonl", "story.txt"}
    assert record["tokens"] == 24 * 4 * 48
    target = load_target(str(model), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model)
    for source, recorded in record["val_nll"].items():
        nll, count = 0.0, 0
        for row in pack([d for d in held if d.source == source], tokenizer, 48):
            ids = torch.from_numpy(row[row >= 0]).long()
            log_probs = target.model(input_ids=ids[None]).logits[0].log_softmax(-1)
            nll -= float(log_probs[:-1].gather(1, ids[1:, None]).sum())
            count += len(ids) - 1
        assert recorded == pytest.approx(nll / count, abs=0.01)


def test_tokenizer_and_template_are_of_the_pockets_kind(model):
    ours, pocket = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(POCKET)
    for text in ("It is in the box.", "  naïve — 東京 🦊\n\n\tx=1234;", ""):
        assert ours.decode(ours(text)["input_ids"]) == text
    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"]
    assert ours.convert_tokens_to_ids(special) == pocket.convert_tokens_to_ids(special) == [0, 1, 2, 3, 4]
    assert ours.convert_ids_to_tokens(range(5, 8)) == pocket.convert_ids_to_tokens(range(5, 8))
    assert (ours.pad_token_id, ours.eos_token_id, ours.mask_token_id, ours.bos_token_id) == (0, 3, 4, None)
    assert len(ours) == 300
    assert len(ours("1234")["input_ids"]) == 4  # digits are single tokens, as in the pocket target
    assert (model / "chat_template.jinja").read_bytes() == (POCKET / "chat_template.jinja").read_bytes()


def test_a_companion_shares_the_tokenizer(root):
    folder = train(root, "companion", "tokenizer=data/pocket", "model.layers=1", "trainer.max_steps=2")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (POCKET / name).read_bytes()
    config, pocket = (json.loads((f / "config.json").read_text()) for f in (folder, POCKET))
    assert config.keys() == pocket.keys()
    assert config["num_hidden_layers"] == 1
    assert [config[k] for k in ("vocab_size", "eos_token_id", "pad_token_id")] == [4096, 3, 0]


@pytest.mark.proof
def test_same_seed_same_weights(root):
    folders = [train(root, f"seed-{i}", "trainer.max_steps=4", f"seed={i // 2}") for i in range(3)]
    weights, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert same(weights, again)
    assert not any(torch.equal(weights[name], other[name]) for name in weights if weights[name].ndim == 2)


TWELVE = ["trainer.max_steps=12", "every=3", "trainer.accumulate_grad_batches=2"]


@pytest.fixture(scope="module")
def whole(root) -> dict[str, torch.Tensor]:
    """Weights after twelve undisturbed steps."""
    return load_file(train(root, "whole", *TWELVE) / "model.safetensors")


@pytest.mark.parametrize("stop", [6, 10], ids=["after a checkpoint", "between checkpoints"])
@pytest.mark.proof
def test_killed_run_resumes_exactly(root, whole, monkeypatch, stop):
    def die(self, trainer, *args):
        save(self, trainer, *args)
        if trainer.global_step == stop:
            raise RuntimeError("killed")

    save, name = Saver.on_train_batch_end, f"killed-{stop}"
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "on_train_batch_end", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(root, name, *TWELVE)
    kept = [p.name for p in (root / f"run-{name}" / "checkpoints").iterdir()]
    assert kept == [str(stop // 3 * 3)]
    assert not (root / name).exists()
    seen: list[int] = []
    item = Sequences.__getitem__
    monkeypatch.setattr(Sequences, "__getitem__", lambda self, i: seen.append(i) or item(self, i))
    resumed = load_file(train(root, name, *TWELVE) / "model.safetensors")
    assert sorted(set(seen)) == list(range(stop // 3 * 3 * 2, 24))
    assert same(whole, resumed)


def test_stopped_run_saves_and_resumes(root, whole, monkeypatch, capsys):
    step = PretrainModule.training_step

    def ask(self, batch, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainModule, "training_step", ask)
        with pytest.raises(Stopped) as left:
            train(root, "stopped", *TWELVE)
    assert left.value.code == 143
    assert "stopped by SIGTERM at step 4;" in capsys.readouterr().err
    assert [p.name for p in (root / "run-stopped" / "checkpoints").iterdir()] == ["4"]
    resumed = load_file(train(root, "stopped", *TWELVE) / "model.safetensors")
    assert same(whole, resumed)


@pytest.mark.proof
def test_run_does_not_resume_with_other_text(root, tmp_path):
    write_text(tmp_path / "text")
    train(tmp_path, "first", "trainer.max_steps=2", "every=1")
    with (tmp_path / "text" / "notes.jsonl").open("a") as notes:
        notes.write('{"text": "More."}\n')
    (tmp_path / "run-second").symlink_to(tmp_path / "run-first")
    with pytest.raises(UserError, match="the text has changed"):
        train(tmp_path, "second", "trainer.max_steps=3", "every=1")


def test_an_epoch_meets_every_row_once_in_any_number_of_processes():
    rows = np.arange(24, dtype=np.int32)[:, None]
    single = Sequences(rows, 4, 12, 0, 1, seed=0)
    order = torch.cat([single[i] for i in range(12)]).flatten().tolist()
    assert sorted(order[:24]) == sorted(order[24:]) == list(range(24))
    assert order[:24] != order[24:]
    ranks = [Sequences(rows, 2, 12, rank, 2, seed=0) for rank in (0, 1)]
    shared = torch.cat([ranks[r][i] for i in range(12) for r in (0, 1)]).flatten().tolist()
    assert shared == order
    assert torch.equal(Sequences(rows, 4, 12, 0, 1, seed=0)[7], single[7]), "no state"


def test_packing_loses_nothing(root):
    documents = read_corpus(root / "text")
    assert documents == sorted(documents, key=lambda d: (d.key, d.source))
    tokenizer = train_tokenizer(documents, 300, 64)
    packed = pack(documents, tokenizer, 48).reshape(-1)
    ids = packed[packed >= 0]
    assert packed.size % 48 == 0
    assert (packed[len(ids) :] == -100).all()
    texts = str(tokenizer.decode(ids.tolist())).split("<|end|>")[:-1]
    assert len(texts) == len(documents)
    plain = {d.text for d in documents if d.text}
    assert plain <= set(texts)
    assert sum(text.startswith("<|user|>Where is") for text in texts) == 120


def test_no_row_has_a_single_token(root):
    documents = read_corpus(root / "text")[:4]
    tokenizer = train_tokenizer(documents, 264, 64)
    count = int((pack(documents, tokenizer, 10_000) >= 0).sum())
    rows = pack(documents, tokenizer, count - 1)
    assert (rows.shape, rows.min() >= 0) == ((1, count - 1), True)


def test_turns_after_the_last_answer_are_left_out_and_a_long_text_is_several_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("q", "a", "r")}))
    (document,) = read_corpus(tmp_path)
    assert [m["role"] for m in document.messages] == ["user", "assistant"]
    (tmp_path / "a.jsonl").unlink()
    paragraphs = [f"{n} " + "word " * 300 for n in range(20)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    documents = read_corpus(tmp_path)
    assert len(documents) > 3
    assert sorted(p for d in documents for p in d.text.split("\n\n")) == sorted(paragraphs)


def test_copies_are_held_out_together(root):
    documents = read_corpus(root / "text")
    train_part, held = hold_out(documents + documents, 0.3)
    assert not {d.key for d in train_part} & {d.key for d in held}
    assert 0.2 < len(held) / len(documents) / 2 < 0.4
    assert hold_out(documents, 0.0) == (documents, [])


def test_muon_gets_the_matrices_of_the_layers(root):
    cfg = compose(TINY.split(), CONF, "lab/train_target")
    tokenizer = train_tokenizer(read_corpus(root / "text"), 300, 64)
    module = PretrainModule(build_model(cfg.model, tokenizer), "")
    optimizer = module.build_optimizer()
    names = {id(p): name for name, p in module.named_parameters()}
    by_kind = {
        type(part).__name__: [names[id(p)] for group in part.param_groups for p in group["params"]]
        for part in optimizer.parts
    }
    assert len(by_kind["Muon"]) == 14
    assert all("_proj" in name for name in by_kind["Muon"])
    assert sorted(chain(*by_kind.values())) == sorted(names.values())


NOT_LEARNED = b'{"turns": ["q", {"role": "assistant", "content": "a", "train": false}]}'
BAD = [  # file, its content, overrides, what the error names
    ("a.md", b"x", "data=/nowhere", "data=/nowhere: no such folder"),
    ("a.md", b"x", "data=null", "data: not given"),
    ("a.md", b"x", "", "no text in it"),
    ("a.jsonl", NOT_LEARNED, "", "a.jsonl:1: an answer is not to be learned"),
    ("a.jsonl", b'{"text": "x"}\n{"tex', "", "a.jsonl:2: not JSON"),
    ("a.jsonl", b"[1]", "", "a.jsonl:1: expected an object"),
    ("a.jsonl", b'{"body": "x"}', "", "a.jsonl:1: needs 'messages', or a 'text'"),
    ("a.jsonl", b'\n{"text": " "}', "", "a.jsonl:2: needs 'messages', or a 'text'"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', "", "a.jsonl:1: the assistant says"),
    ("a.txt", b"\xff\xfe\x00", "", "a.txt: not UTF-8"),
    ("a.txt", b"abc " * 9, "val_share=0", r"vocab_size=300: the text supports 26\d"),
    ("a.txt", b"abc", "vocab_size=100 val_share=0", "vocab_size=100: bytes"),
    ("a.txt", b"abc", "val_share=0.001", "none would be held out"),
    ("a.txt", b"abc", "val_share=1", "none would be trained on"),
    ("a.txt", b"abc", "tokenizer=/nowhere val_share=0", "no tokenizer.json"),
    ("a.txt", b"abc", "seq_length=65", "longer than model.context=64"),
    ("a.txt", b"abc " * 99, "model.heads=3 vocab_size=264 val_share=0", "even multiple"),
    ("a.txt", b"abc", "trainer.max_steps=0", "trainer.max_steps=0: must be at least 1"),
]


@pytest.mark.parametrize(("name", "content", "overrides", "message"), BAD)
def test_bad_input_is_one_line(tmp_path, name, content, overrides, message):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        train(tmp_path, "out", *overrides.split())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_training_continues_from_the_weights_of_a_model(root, model):
    steps = ["trainer.max_steps=2", "every=2"]
    before = load_file(model / "model.safetensors")
    moved = {}
    for rate in (1e-6, 0.1):
        folder = train(root, f"continued-{rate}", f"init_from={model}", f"rate={rate}", *steps)
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == before.keys()
        moved[rate] = sum(float((weights[name] - old).float().abs().sum()) for name, old in before.items())
        assert stop_tokens(load_target(str(folder))) == [3]
        assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert moved[1e-6] < 1e-3 * moved[0.1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("tokenizer=data/pocket", "tokenizer: init_from has its own"),
        ("rate=0", "rate=0: must be above 0"),
        ("seq_length=65 model.context=128", "seq_length=65: init_from=.* has 64 positions"),
        ("init_from=/no/model", "init_from=/no/model: no tokenizer.json in it"),
    ],
)
def test_init_from_refuses_options_that_do_not_fit(root, model, overrides, message):
    with pytest.raises(UserError, match=message):
        train(root, "refused", f"init_from={model}", *overrides.split())
