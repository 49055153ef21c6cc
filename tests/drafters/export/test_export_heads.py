"""Heads and whole models in other programs' files: their loaders' rules give our logits, and back."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace

import pytest
import served_heads
import torch
from faces import Follower, V, batch_of, equal, plans_of, random_texts
from safetensors.torch import load_file, save_file
from served_heads import MisfitError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from workbench import make_target

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as hub
from drafters.export import formats as table
from drafters.models.hf_dllm import Dllm
from drafters.models.lm import DraftLM

K = 3
MEDUSA = [
    {},
    {"own_head": False},
    {"layers": 2, "bias": True},
]
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
    hub.save(drafter, target, checkpoint)
    layout = table.write_layout(hub.as_saved(hub.load(checkpoint, target)), target, to)
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
    """Logits of every depth from our own training face, as if the features were the target's."""
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


# -- through the loader's rules --------------------------------------------------------------------


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
    assert gap(theirs, own) > 0.01
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


def swapped(tensors, one, other):
    def name(n):
        return n.replace(one, "<>").replace(other, one).replace("<>", other)

    return {name(n): w for n, w in tensors.items()}


BROKEN = {
    "a missing head": lambda c, t: (c, {n: w for n, w in t.items() if n != "lm_heads.1.weight"}),
    "blocks swapped": lambda c, t: (c, swapped(t, "blocks.0", "blocks.1")),
    "heads swapped": lambda c, t: (c, swapped(t, "lm_heads.0", "lm_heads.2")),
    "a dropped bias": lambda c, t: (c | {"medusa_fc_bias": False}, t),
    "a block's layers in FasterDecoding's names": lambda c, t: (c, swapped(t, "layers.0.", "0.linear.")),
    "one layer": lambda c, t: (c | {"num_hidden_layers": 1}, t),
    "half a vocabulary": lambda c, t: (c | {"truncated_vocab_size": V // 2, "vocab_size": V // 2}, t),
    "another scale": lambda c, t: (c | {"logit_scale": 2.0}, t),
    "a shared head that is not": lambda c, t: (c | {"original_lm_head": True}, t),
}
UNLIKE = ("blocks swapped", "heads swapped", "another scale")  # right by name and shape


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_medusa_is_caught(target, make_drafter, tmp_path, fault):
    drafter = make_drafter("medusa", target, depth=K, layers=2, bias=True)
    config, tensors = BROKEN[fault](*files(exported(drafter, target, tmp_path)[0]))
    if fault not in UNLIKE:
        with pytest.raises(MisfitError):
            served_heads.medusa(config, tensors, K)
        return
    features, read = inputs()
    run = served_heads.medusa(config, tensors, K)
    assert gap(run(features), ours(drafter, target, features, read)) > 1e-2


@pytest.mark.parametrize("fault", ["a dropped norm", "state weight", "token weight", "unscaled input"])
def test_a_broken_speculator_is_caught(target, make_drafter, tmp_path, fault):
    drafter = make_drafter("mlp", target, depth=K, tie_weights=True, scale_input=True, inner_size=8)
    config, tensors = files(exported(drafter, target, tmp_path)[0])
    features, read = inputs()
    if fault == "a dropped norm":
        with pytest.raises(MisfitError, match=r"ln\.0\.weight"):
            served_heads.mlp(config, {n: w for n, w in tensors.items() if n != "ln.0.weight"}, K)
        return
    tokens = K
    if fault == "state weight":  # of tied depths, names do not tell how many there are
        tokens = config["n_predict"] = K + 1
        config["top_k_tokens_per_head"] = [1] * tokens
        read = torch.cat([read, read[:, :1]], 1)
    if fault == "token weight":
        tensors["emb.0.weight"] = tensors["emb.0.weight"] * 0.7
    if fault == "unscaled input":
        config["scale_input"] = False
    found = served_heads.mlp(config, tensors, tokens)(features, read)[:K]
    assert gap(found, ours(drafter, target, features, read[:, :K])) > 1e-3


# -- and back --------------------------------------------------------------------------------------


def tau(target, drafter) -> float:
    dice = random.Random(5)
    prompts = [[dice.randrange(V) for _ in range(dice.randint(2, 9))] for _ in range(6)]
    answers = generate(target, None, prompts, max_new_tokens=16, sampler=Sampler(0.0)).outputs
    rollouts = [Rollout(p, o.tokens) for p, o in zip(prompts, answers, strict=True)]
    (done,) = replay(target, drafter, rollouts, [Plan(depth=drafter.depth)], Sampler(0.0))
    return done.counts.tau


def alike(target, one, other) -> None:
    """Same settings, weights, drafts and tau."""
    assert type(one) is type(other)
    unused = {"info_rank", "hot_tokens"}  # of a bias that there is none of
    assert {n: v for n, v in one.settings.items() if n not in unused} == {
        n: v for n, v in other.settings.items() if n not in unused
    }
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    drafts = []
    for drafter in (one, other):
        follower = Follower(drafter.requires_grad_(False), target, random_texts(), (5, 3))
        drafts.append([follower.propose(plan) for plan in plans_of(drafter)])
    assert all(equal(*pair) for pair in zip(*drafts, strict=True))
    assert tau(target, one) == tau(target, other)


@pytest.mark.parametrize(
    ("name", "form"), [*(("medusa", form) for form in MEDUSA), *(("mlp", form) for form in MLP[:2])], ids=str
)
def test_what_was_exported_comes_back(target, make_drafter, tmp_path, name, form):
    drafter = make_drafter(name, target, depth=K, **form)
    if name == "mlp":
        drafter.settings["inner_size"] = drafter.inner  # a file says what 0 stands for
    folder, _ = exported(drafter, target, tmp_path)
    alike(target, drafter, hub.load(folder, target))
    fresh = make_drafter(name, target, seed=3, depth=K, **form)
    assert hub.warm_start(fresh, folder, target) == []


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


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_fasterdecodings_own_files_are_read(target, make_drafter, tmp_path, name, layers):
    drafter = make_drafter("medusa", target, depth=K, layers=layers, bias=True)
    folder = fasterdecoding(drafter, tmp_path / "theirs", name)
    alike(target, drafter, hub.load(folder, target))


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
    alike(target, drafter, hub.load(folder, target))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("medusa", {"hidden": 8}, "made for another target: its hidden size is 16, the target's 8"),
        ("medusa", {"vocab": V + 1}, f"made for another target: its vocabulary is {V}, the target's {V + 1}"),
        ("mlp", {"hidden": 8}, "made for another target: its hidden size is 16, the target's 8"),
        ("mlp", {"vocab": V + 1}, f"made for another target: its vocabulary is {V}, the target's {V + 1}"),
    ],
)
def test_another_targets_is_refused(target, make_drafter, tiny_target, tmp_path, name, change, reason):
    folder, _ = exported(make_drafter(name, target), target, tmp_path)
    other = tiny_target(**{"vocab": V, "hidden": 16, "dtype": torch.float32} | change)
    with pytest.raises(UserError, match=reason):
        hub.load(folder, other)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("medusa", {"blocks.1.layers.0.weight": None}, "1 tensors are missing, blocks.1.layers.0.weight"),
        ("medusa", {"lm_heads.2.weight": None}, "1 tensors are missing, lm_heads.2.weight first"),
        ("medusa", {"blocks.99999999.layers.99999999.weight": torch.zeros(1)}, "tensors are missing"),
        ("medusa", {f"blocks.{'9' * 5000}.layers.0.weight": torch.zeros(1)}, "damaged checkpoint"),
        ("medusa", {"model.layers.0.x": torch.zeros(1)}, "1 tensors have no place in such a drafter"),
        ("medusa", {"token_map": torch.zeros(7)}, "its heads know 7 tokens"),
        ("mlp", {"ln.0.bias": None}, "1 tensors are missing, ln.0.bias first"),
        (
            "mlp",
            {"ln0.weight": torch.zeros(1)},
            "no place in such a drafter, ln0.weight first",
        ),
        ("mlp", {"n_predict": 10**9}, "n_predict=1000000000 for 6 tensors"),
        ("mlp", {"inner_dim": 10**12}, "inner_dim=1000000000000, the tensors: 16"),
        ("mlp", {"model.safetensors": None}, "no weights there"),
    ],
)
def test_a_damaged_folder_is_one_line(target, make_drafter, tmp_path, name, change, reason):
    folder, _ = exported(make_drafter(name, target), target, tmp_path)
    config, tensors = files(folder)
    ((key, value),) = change.items()
    if key in config:
        config[key] = value
    elif value is None:
        tensors.pop(key, None)
    else:
        tensors[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    if key == "model.safetensors":
        (folder / key).unlink()
    with pytest.raises(UserError, match=reason) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)


def test_another_scale_is_put_into_the_heads(target, make_drafter, tmp_path):
    target.head = replace(target.head, scale=0.25)
    drafter = make_drafter("medusa", target, depth=K, own_head=False)
    folder, _ = exported(drafter, target, tmp_path)
    config, tensors = files(folder)
    (folder / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    loaded = hub.load(folder, target)
    assert loaded.settings["own_head"]
    features, read = inputs()
    theirs = served_heads.medusa(config | {"logit_scale": 0.5}, tensors, K)(features)
    assert gap(theirs, ours(loaded, target, features, read)) < 1e-5


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "to", "reason"),
    [
        (
            "medusa",
            {"token_info": "vanilla"},
            "vllm",
            "no token_info=vanilla; train with drafter.token_info=none, or set to=native",
        ),
        ("medusa", {}, "sglang", "sglang has no format for drafter 'medusa'; set to=vllm or native"),
        (
            "hydra",
            {},
            "vllm",
            "vllm has no format for drafter 'hydra'; no engine takes this drafter; set to=native",
        ),
        ("lstm", {}, "vllm", "'lstm'; ArcticInference"),
        ("bigram", {}, "vllm", "'bigram'; no engine takes this drafter; set to=native"),
        ("ngram", {}, "vllm", '\'ngram\'; it has prompt lookup of its own.*"method": "ngram"'),
        ("ngram", {}, "sglang", "--speculative-algorithm NGRAM"),
        ("suffix", {}, "vllm", '"method": "suffix"'),
        ("suffix", {}, "sglang", "set to=native"),
        ("hf_dllm", {}, "vllm", "vllm has no format for drafter 'hf_dllm'; set to=hf or native"),
    ],
)
def test_what_an_engine_cannot_load_is_refused(target, make_drafter, name, options, to, reason):
    saved = hub.as_saved(make_drafter(name, target, **options))
    with pytest.raises(UserError, match=f"^to={to}: .*{reason}"):
        table.write_layout(saved, target, to)


@pytest.mark.parametrize("own_head", [True, False])
def test_a_target_whose_head_has_a_bias_is_refused(target, make_drafter, tmp_path, own_head):
    drafter = make_drafter("medusa", target, own_head=own_head)
    folder, _ = exported(drafter, target, tmp_path)
    target.head = replace(target.head, bias=torch.zeros(V))
    with pytest.raises(
        UserError, match=r"the target's head has a bias.*no engine takes this drafter; set to"
    ):
        table.write_layout(hub.as_saved(drafter), target, "vllm")
    with pytest.raises(UserError, match="this target's head has a bias"):
        hub.load(folder, target)


# -- whole models ----------------------------------------------------------------------------------


def draft_model(folder, vocab, tied=False):
    """A Llama with wavelengths of its own."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(vocab_size=vocab, **shape, tie_word_embeddings=tied, rope_parameters=rope)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(9)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def says(model, texts):
    return model(input_ids=texts).logits


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Target:
    """A target with a place, a tokenizer and an end of text."""
    return load_target(str(make_target(tmp_path_factory.mktemp("chat") / "target")))


@pytest.mark.parametrize("to", ["hf", "vllm", "sglang"])
@pytest.mark.parametrize("form", ["plain", "adapted", "tied", "cut"])
@pytest.mark.covering
def test_a_draft_model_is_a_plain_folder(chat, tmp_path, form, to):
    tied = form == "tied"
    path = None if form == "cut" else str(draft_model(tmp_path / "draft", chat.vocab_size, tied))
    lora = {"r": 2, "alpha": 4} if form == "adapted" else None
    drafter = DraftLM.for_target(chat, path=path, layers=1, lora=lora).eval()
    for name, weight in drafter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    folder, layout = exported(drafter, chat, tmp_path, to)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = random_texts()
    assert float((says(model, texts) - says(drafter.model, texts)).abs().max()) < 1e-5
    config, tensors = files(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == chat.vocab_size
    assert config["torch_dtype"] == "float32"
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert ("lm_head.weight" in tensors) is not tied
    assert not [name for name in tensors if "lora" in name]
    assert model.generation_config.eos_token_id == chat.model.generation_config.eos_token_id
    ids = AutoTokenizer.from_pretrained(folder).get_vocab()
    assert ids == AutoTokenizer.from_pretrained(chat.model.name_or_path).get_vocab()
    assert AutoTokenizer.from_pretrained(folder).chat_template
    advice = layout.command("t", "d") + layout.note
    assert ("STANDALONE" in advice) is (to == "sglang")
    assert ("draft_model" in advice) is (to == "vllm")
    assert ("to=vllm" in advice) is (to == "hf")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", [-5, 7])
def test_engines_get_the_targets_vocabulary_size(chat, make_drafter, tmp_path, monkeypatch, more, tied):
    monkeypatch.setattr("drafters.models.lm.check_vocabulary", lambda *_: None)  # the padding is at stake
    size = chat.vocab_size + more
    drafter = make_drafter("lm", chat, path=str(draft_model(tmp_path / "draft", size, tied)))
    folder, _ = exported(drafter, chat, tmp_path)
    config, tensors = files(folder)
    assert config["vocab_size"] == chat.vocab_size == len(tensors["model.embed_tokens.weight"])
    texts = random_texts()
    found = says(AutoModelForCausalLM.from_pretrained(folder).eval(), texts)
    want = says(drafter.model, texts)
    both = min(size, chat.vocab_size)
    assert found.shape[-1] == chat.vocab_size
    assert float((found[..., :both] - want[..., :both]).abs().max()) < 1e-5
    assert int(found.argmax(-1).max()) < both
    if more < 0:
        mean = want.mean(-1, keepdim=True).expand(-1, -1, -more)
        torch.testing.assert_close(found[..., both:], mean, rtol=0, atol=1e-5)
    assert table.write_layout(hub.as_saved(drafter), chat, "hf").config["vocab_size"] == size
    if more < 0 and not tied:  # a new id is read as the last one
        texts[:, 3], others = size + 1, texts.clone()
        others[:, 3] = size - 1
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(says(model, texts), says(model, others))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_model_that_fills_in_masks_is_a_plain_folder(target, make_drafter, tmp_path, kind):
    door, drafter = AutoModelForCausalLM, make_drafter("hf_dllm", target)
    if kind == "bert":
        door, path = AutoModelForMaskedLM, tmp_path / "bert"
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        BertForMaskedLM(BertConfig(vocab_size=V, max_position_embeddings=64, **shape)).save_pretrained(path)
        sizes = {"mask_token": V - 1, "depth": K, "shift": 0, "steps": 1, "anchors": 4}
        drafter = Dllm.for_target(target, path=str(path), **sizes).eval()
        torch.nn.init.normal_(drafter.model.cls.predictions.bias)
    folder, layout = exported(drafter, target, tmp_path, "hf")
    assert files(folder)[0]["mask_token_id"] == drafter.settings["mask_token"]
    again, texts = door.from_pretrained(folder).eval(), random_texts()
    assert float((says(again, texts) - says(drafter.model, texts)).abs().max()) < 1e-5
    assert "no engine" in layout.note


@pytest.mark.parametrize("more", [-5, 0, 7])
def test_families_with_other_names_go_through(chat, tmp_path, monkeypatch, more):
    """GPT-2: tied, its maps lie the other way, and nothing of it is called what a Llama calls it."""
    monkeypatch.setattr("drafters.models.lm.check_vocabulary", lambda *_: None)
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=chat.vocab_size + more, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "draft")
    drafter = DraftLM.for_target(chat, path=str(tmp_path / "draft")).eval()
    folder, _ = exported(drafter, chat, tmp_path)
    found = says(AutoModelForCausalLM.from_pretrained(folder).eval(), random_texts())
    want = says(drafter.model, random_texts())
    both = min(found.shape[-1], want.shape[-1])
    assert found.shape[-1] == chat.vocab_size
    assert float((found[..., :both] - want[..., :both]).abs().max()) < 1e-5


def test_medusa2_is_two_folders(target, make_drafter, tmp_path):
    drafter = make_drafter("medusa2", target, depth=K)
    heads, layout = exported(drafter, target, tmp_path)
    assert speculative(layout)[0][2] == "TUNED_TARGET"
    assert "to=hf" in layout.note
    (tmp_path / "again").mkdir()
    whole, _ = exported(drafter, target, tmp_path / "again", "hf")
    moved = AutoModelForCausalLM.from_pretrained(whole).eval()
    texts = random_texts()
    want = says(drafter.verifier(target).model, texts)
    # The tiny target's norms are torch's, and round at another place.
    assert float((says(moved, texts) - want).abs().max()) < 1e-4
    assert float((says(target.model, texts) - want).abs().max()) > 1e-2
    features, _ = inputs()
    theirs = served_heads.medusa(*files(heads), K)(features)
    with torch.no_grad():
        own = [
            drafter.lm_heads.head_for(j, target.head)(block(features))
            for j, block in enumerate(drafter.blocks, 1)
        ]
    assert gap(theirs, own) < 1e-5
