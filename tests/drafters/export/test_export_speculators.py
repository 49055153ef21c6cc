"""Drafters in the files of speculators and of DFlash: loaded by their rules they are the same drafters."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from drafter_checks import batch_of, random_texts
from served_speculators import draft, load

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.folder import target_name
from drafters.export import formats
from drafters.export.speculators_write import invert_fusion

V, LAYERS, K, MASK, NAME = 40, 8, 3, 7, "some/target"
PLAIN = {"norm_before_fc": False, "fc_norm": False}
CASES = {
    "eagle3": ("eagle3", "speculators", {}),
    "eagle3 as the paper has it": ("eagle3", "speculators", PLAIN),
    "eagle3 of gpt-oss": ("eagle3", "speculators", PLAIN | {"norm_before_fc": True}),
    "eagle3 of speculators": ("eagle3", "speculators", {"norm_before_residual": True, "norm_output": True}),
    "eagle3 of two layers": ("eagle3", "speculators", {"layers": 2}),
    "eagle3 of all tokens": ("eagle3", "speculators", {"draft_vocab_size": V}),
    "eagle3 of four taps": ("eagle3", "speculators", {"taps": [1, 2, 4, 5]}),
    "eagle3 of taps in disorder": ("eagle3", "speculators", {"taps": [5, 0, 3]}),
    "eagle3 with biases": ("eagle3", "speculators", {"layers": 2, "qkv_bias": True, "o_bias": True}),
    "eagle3 of Qwen3's layers": ("eagle3", "speculators", {"layers": 2, "qk_norm": True}),
    "eagle3 of Qwen3's layers with biases": ("eagle3", "speculators", {"qk_norm": True, "qkv_bias": True}),
    "p_eagle with biases": ("p_eagle", "speculators", {"layers": 2, "qkv_bias": True}),
    "p_eagle": ("p_eagle", "speculators", {"layers": 2}),
    "p_eagle as the paper has it": ("p_eagle", "speculators", PLAIN | {"norm_before_residual": True}),
    "p_eagle of gpt-oss": ("p_eagle", "speculators", PLAIN | {"norm_before_fc": True}),
    "p_eagle of vLLM": ("p_eagle", "vllm", {"layers": 2, "taps": [6, 1, 3]}),
    "p_eagle of vLLM, gpt-oss": (
        "p_eagle",
        "vllm",
        {"norm_before_fc": True, "fc_norm": False, "taps": [1, 5]},
    ),
    "p_eagle of vLLM, Qwen3's layers with biases": (
        "p_eagle",
        "vllm",
        PLAIN | {"qk_norm": True, "qkv_bias": True, "layers": 2, "taps": [1, 4, 6], "draft_vocab_size": V},
    ),
    "dflash": ("dflash", "speculators", {"taps": [2, 4, 6]}),
    "dflash of fewer tokens": ("dflash", "speculators", {"taps": [2, 4, 6], "draft_vocab_size": 9}),
    "dflash of its authors": ("dflash", "vllm", {"taps": [6, 2, 3]}),
    "dspark": ("dspark", "speculators", {"taps": [2, 4, 6]}),
    "dspark of masks": ("dspark", "speculators", {"taps": [1, 5], "sample_from_anchor": False}),
    "dspark of fewer tokens": ("dspark", "speculators", {"taps": [2, 4], "draft_vocab_size": 9}),
    "dspark of its authors": ("dspark", "vllm", {"taps": [6, 2, 3]}),
    "dspark of its authors, of masks": ("dspark", "vllm", {"taps": [2, 4], "sample_from_anchor": False}),
    "dspark of its authors, of fewer tokens": ("dspark", "vllm", {"taps": [2, 4], "draft_vocab_size": 9}),
    "eagle3 with a window": ("eagle3", "speculators", {"window": 4, "layers": 2}),
    "p_eagle with a window": ("p_eagle", "speculators", {"window": 4}),
    "dflash with a window": ("dflash", "speculators", {"taps": [2, 4, 6], "window": 3}),
    "a causal dflash with a window": ("dflash", "speculators", {"taps": [2, 4], "window": 3, "causal": True}),
    "dflash with a window, of its authors": ("dflash", "vllm", {"taps": [2, 4], "window": 5}),
    "a causal dflash of its authors": ("dflash", "vllm", {"taps": [2, 4], "causal": True}),
}


@pytest.fixture
def target(tiny_target):
    """With a name to be loaded by, a token nobody writes, and an end."""
    made = tiny_target(vocab=V, layers=LAYERS, hidden=16, dtype=torch.float32)
    made.model.config._name_or_path = made.model.name_or_path = NAME
    made.config.pad_token_id, made.config.eos_token_id, made.config.bos_token_id = MASK, [3, 5], 11
    return made


@pytest.fixture
def made(target, make_drafter):
    """A drafter as it is, and as another program would find it."""

    def make(case):
        name, to, options = CASES[case]
        drafter = make_drafter(name, target, depth=K, **options)
        if name == "p_eagle":  # random norms and `fc` give no feature that is larger than they are
            with torch.no_grad():
                drafter.mask_hidden.mul_(0.5)
        return drafter, formats.write_layout(checkpoint_io.as_saved(drafter), target, to)

    return make


def ours(drafter, target, text) -> dict[tuple[int, int], torch.Tensor]:
    """(anchor, depth) -> (V,) logits of training, -inf outside of its vocabulary."""
    found = {}
    with torch.no_grad():
        for step in drafter.unroll(batch_of(target, text[None]), target):
            logits = step.head(step.hidden)
            if step.head.d2t is not None:
                none = logits.new_full((len(logits), V), -torch.inf)
                logits = none.index_copy(1, step.head.d2t, logits)
            found |= {(a, step.depth): row for a, row in zip(step.anchor.tolist(), logits, strict=True)}
    return found


def unmasked(rows, length, seed):
    """Texts without the token that stands for masks: P-EAGLE's embedding of it is not the target's."""
    texts = random_texts(rows, length, seed)
    return texts.masked_fill(texts == MASK, MASK + 1)


@torch.no_grad()
def apart(drafter, target, layout, texts, roots=10) -> float:
    """The largest difference of logits on so many random texts and places of a root."""
    _, *words = shlex.split(layout.command("T", "D"))
    command = json.loads(words[-1]) if "--speculative-config" in words else {}
    served, most = load(layout.config, layout.tensors, command), 0.0
    assert served.tokens == K
    target.tap(drafter.taps)
    for text in unmasked(texts, roots + K + 1, seed=2):
        mine = ours(drafter, target, text)
        states = target.model(text[None], output_hidden_states=True).hidden_states
        for anchor in range(roots):
            theirs = draft(served, target.model, states, text, anchor)
            for depth in range(1, K + 1):
                got, want = theirs[depth - 1], mine[anchor, depth]
                if not torch.equal(got.isinf(), want.isinf()):
                    return torch.inf
                known = ~want.isinf()
                most = max(most, float((got - want)[known].abs().max()))
    return most


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci("p_eagle", "eagle3", "dflash", "eagle3 of speculators", "dspark", "dspark of fewer tokens")
def test_readers_rebuild_the_drafter_from_its_files(made, target, case):
    """Every tensor is there and no other, each of its shape; and the logits are the same."""
    drafter, layout = made(case)
    texts = 10 if case in ("eagle3", "p_eagle", "dflash", "dspark") else 2  # times ten places of the root
    assert apart(drafter, target, layout, texts) < 1e-5


@pytest.mark.parametrize("case", ["eagle3", "p_eagle", "dflash", "dspark"])
def test_the_configuration_says_what_the_target_is(made, target, case):
    config = made(case)[1].config
    assert "model_type" not in config
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
    }
    layers = config["transformer_layer_config"]
    assert (layers["bos_token_id"], layers["eos_token_id"], layers["pad_token_id"]) == (11, [3, 5], 7)
    assert layers["vocab_size"] == V
    assert layers["max_position_embeddings"] == target.max_positions
    assert json.loads(json.dumps(config)) == config


def test_the_embedding_is_the_targets_but_for_the_mask(made, target):
    """EAGLE-3 needs it: speculators would compute with zeros."""
    assert torch.equal(made("eagle3")[1].tensors["embed_tokens.weight"], target.embed.weight)
    assert not {"embed_tokens.weight", "lm_head.weight"} & made("dflash")[1].tensors.keys()
    drafter, layout = made("p_eagle")
    rows = layout.tensors["embed_tokens.weight"]
    differ = (rows != target.embed.weight).any(-1).nonzero().flatten().tolist()
    assert differ == [MASK] == [layout.config["mask_token_id"]]
    assert torch.equal(rows[MASK], drafter.mask_token)
    assert not torch.equal(rows[MASK], target.embed.weight[MASK])


def drop(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def put(**changes):
    return lambda config, tensors: config.update(changes)


def layers(**changes):
    return lambda config, tensors: config["transformer_layer_config"].update(changes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci(
    "eagle3",
    "eagle3 of gpt-oss",
    "eagle3 of taps in disorder",
    "eagle3 of Qwen3's layers with biases",
    "p_eagle",
    "p_eagle of vLLM",
    "dflash of fewer tokens",
    "dflash of its authors",
    "dspark",
    "dspark of its authors, of masks",
    "eagle3 with a window",
    "a causal dflash with a window",
)
def test_what_was_exported_is_read_back_with_the_same_tau(made, target, tmp_path, case):
    drafter, layout = made(case)
    layout.write(tmp_path)
    back = checkpoint_io.load(tmp_path, target)
    assert type(back) is type(drafter)
    if CASES[case][1] == "speculators":
        assert target_name(tmp_path) == back.origin.name == NAME
    changed = {k for k, v in drafter.settings.items() if back.settings.get(k) != v}
    sorted_taps = {"taps"} if drafter.settings["taps"] != sorted(drafter.taps) else set()
    unsaid = {"depth"} if case.startswith("p_eagle of vLLM") else set()
    assert changed <= {"anchors", "depth_weight", "rate"} | sorted_taps | unsaid
    texts = unmasked(2, 14, seed=9).tolist()
    rollouts = [Rollout(text[:4], text[4:]) for text in texts]
    plans = [Plan(depth=K), Plan(depth=K, proposal="sampled")]
    found = []
    for one in (drafter, back):
        target.tap(one.taps)
        found.append(replay(target, one.eval(), rollouts, plans, Sampler(1.0)))
    before, after = found
    for one, other in zip(before, after, strict=True):
        assert abs(one.counts.tau - other.counts.tau) < 1e-5
    assert before[1].counts.tau > 1.0


STARTED = ["eagle3", "p_eagle", "dflash", "dspark", "dspark of fewer tokens", "dflash of fewer tokens"]


@pytest.mark.parametrize("case", STARTED)
def test_training_starts_from_what_was_exported(made, target, make_drafter, tmp_path, case):
    drafter, layout = made(case)
    layout.write(tmp_path)
    name, _, options = CASES[case]
    fresh = make_drafter(name, target, depth=K, seed=3, **options)
    assert checkpoint_io.warm_start(fresh, tmp_path, target) == []
    for key, value in drafter.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def train_embedding(config, tensors):
    tensors["embed_tokens.weight"][2] += 1


IDS = "eagle_aux_hidden_state_layer_ids"
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
REFUSED = {
    "an unknown kind": ("eagle3", put(speculators_model_type="xyz"), "'xyz' has no drafter"),
    "another width": ("eagle3", layers(hidden_size=32), "hidden_size is 32, the target's 16"),
    "another vocabulary": ("dflash", layers(vocab_size=41), "vocab_size is 41, the target's 40"),
    "layers that are not there": ("eagle3", put(**{IDS: [2, 4, 8]}), r"layers \[2, 4, 8\]"),
    "layers of another kind": ("eagle3", layers(model_type="gpt_oss"), "model_type 'gpt_oss'"),
    "norms that are missing": ("eagle3", layers(model_type="qwen3"), "layers.0.q_norm.weight"),
    "biases": ("eagle3", layers(attention_bias=True), "attention_bias"),
    "scaled positions": ("eagle3", layers(rope_parameters={"rope_type": "longrope"}), "longrope"),
    "layers of two kinds": ("dflash", layers(**TWO_KINDS), "some of its layers see a window"),
    "a window of no size": ("eagle3", layers(layer_types=["sliding_attention"]), "sliding_window is None"),
    "no d2t": ("eagle3", drop("d2t"), "d2t, which maps them, is missing"),
    "a d2t of nonsense": ("eagle3", lambda _, tensors: tensors["d2t"].add_(99), "d2t does not hold offsets"),
    "an embedding of its own": ("eagle3", train_embedding, "it has its own embedding"),
    "an embedding that was trained": ("p_eagle", train_embedding, "its embedding was trained"),
    "a root that predicts": ("dflash", put(sample_from_anchor=True), "sample_from_anchor"),
    "fewer tokens without a map": ("dflash", put(draft_vocab_size=8), "its head has 8 of 40 tokens, and d2t"),
    "fewer tokens with another head": (
        "dflash of fewer tokens",
        lambda _, tensors: tensors["lm_head.weight"].add_(1),
        "it has its own lm_head.weight",
    ),
    "more tokens than its map": ("dflash of fewer tokens", put(draft_vocab_size=8), "d2t has 9 tokens, and"),
    "a head of its own": (
        "dflash",
        lambda _, tensors: tensors.update({"lm_head.weight": torch.zeros(V, 16)}),
        "it has its own lm_head.weight",
    ),
    "a block without end": ("dflash", put(block_size=2**20), "depth=1048575"),
    "a mask of P-EAGLE that is no token": ("p_eagle", put(mask_token_id=-1), "its mask is token -1"),
    "a mask without a token": (
        "p_eagle of vLLM",
        lambda config, _: config.pop("pard_token"),
        "no id of a mask",
    ),
    "an embedding that was trained, of vLLM": (
        "p_eagle of vLLM",
        train_embedding,
        "its embedding was trained",
    ),
    "a mask that is no token": ("dflash", put(mask_token_id=V), "its mask is token 40"),
    "another projector": (
        "dflash of its authors",
        lambda config, _: config["dflash_config"].update(projector_type="domino"),
        "projector_type is 'domino'",
    ),
    "a tensor short": ("eagle3", drop("layers.0.self_attn.k_proj.weight"), "damaged checkpoint"),
    "a key short": ("eagle3", lambda config, _: config.pop("draft_vocab_size"), "damaged checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_none_of_our_drafters_are_refused_in_a_line(made, target, tmp_path, name):
    case, change, said = REFUSED[name]
    _, layout = made(case)
    change(layout.config, layout.tensors)
    layout.write(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        checkpoint_io.load(tmp_path, target)
    assert "\n" not in str(caught.value)


SLIDING = {"layer_types": ["sliding_attention"] * 2}
WINDOW, FULL = SLIDING | {"sliding_window": 32}, {"layer_types": ["full_attention"] * 2, "sliding_window": 32}
CAUSAL = {"sliding_window_non_causal": False}
NINE = {"sliding_window": 9}
# Program, settings in its layers' config, in the whole -> window and causality.
READ = {
    "causal": ("speculators", WINDOW, CAUSAL, (32, True)),
    "bidirectional": ("speculators", WINDOW, {"sliding_window_non_causal": True}, (32, False)),
    "the whole text": ("speculators", FULL, CAUSAL, (None, False)),
    "the authors', by layer": ("vllm", {}, SLIDING | NINE, (9, True)),
    "the authors', by switch": ("vllm", {"use_swa": True, "swa_window_size": 5}, NINE, (5, False)),
    "the authors', said": ("vllm", {"causal": True}, SLIDING | NINE | {"is_causal": False}, (9, False)),
}


@pytest.mark.parametrize("name", READ)
def test_a_block_with_a_window_is_read_as_it_was_trained(made, target, tmp_path, name):
    to, inner, outer, want = READ[name]
    _, layout = made("dflash" if to == "speculators" else "dflash of its authors")
    layout.config["transformer_layer_config" if to == "speculators" else "dflash_config"].update(inner)
    layout.config.update(outer)
    layout.write(tmp_path)
    settings = checkpoint_io.load(tmp_path, target).settings
    assert (settings["window"], settings["causal"]) == want


def test_masks_that_no_input_gives_are_refused():
    """The norm makes the input long, and `fc` keeps all of it: nothing short comes out."""
    fc = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert invert_fusion(torch.full((4,), 0.1), fc, [torch.ones(4)], 1e-6) is None
    assert invert_fusion(torch.full((4,), 0.1), torch.zeros(4, 8), [torch.ones(8)], 1e-6) is None


def test_the_command_names_the_folder(made):
    assert made("eagle3")[1].command("T", "D") == "vllm serve D"
    *said, config = shlex.split(made("dflash of its authors")[1].command("T", "/a/b"))
    assert said == ["vllm", "serve", "T", "--speculative-config"]
    assert json.loads(config) == {"method": "dflash", "model": "/a/b", "num_speculative_tokens": K}


def test_both_engines_read_the_authors_folder(target, make_drafter):
    saved = checkpoint_io.as_saved(make_drafter("dflash", target, depth=K))
    one, other = (formats.write_layout(saved, target, to) for to in ("vllm", "sglang"))
    assert one.config == other.config
    assert all(torch.equal(other.tensors[name], value) for name, value in one.tensors.items())
    assert f"--speculative-num-draft-tokens {K + 1}" in other.serve


@pytest.mark.parametrize("mask", [V, MASK])
def test_a_mask_that_is_no_token_or_nothing_is_refused(target, make_drafter, mask):
    target.embed.weight.data[MASK] = 0.0
    with pytest.raises(UserError, match=rf"drafter\.mask_id={mask}: "):
        make_drafter("dflash", target, mask_id=mask)
