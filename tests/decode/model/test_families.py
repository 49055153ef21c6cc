"""Model families through the front door: they decode losslessly, or one line says why not."""

import json

import numpy as np
import pytest
import torch
from elsewhere import HYBRID, MLA
from families import BASE, LENGTH, NOBODY, PROMPTS, SMALL_GPT, VOCAB, WORKS, save
from scripted import Oracle, Watch, greedy, no_compaction, rows_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model import probe as probe_module
from decode.model.cache import RowStore
from decode.model.causal_lm import CausalLM
from decode.model.head import Head
from decode.model.load import load_config, load_target
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
from decode.sampling import Sampler

EXACT = 1e-9  # fp64, absolute
TREE = Plan(depth=4, width=3, nodes=12)
RECURRENT = "state cannot be rolled back"
REFUSED = {
    "bloom": (SMALL_GPT | {"hidden_size": 32}, "BloomForCausalLM cannot be decoded losslessly"),
    "mpt": (NOBODY | {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4}, "MptForCausalLM"),
    "gpt_neo": (
        NOBODY
        | {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 6}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
        "GPTNeoForCausalLM cannot be decoded losslessly",
    ),
    "mamba": (BASE | {"state_size": 8}, RECURRENT),
    "mamba2": (BASE | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}, RECURRENT),
    "jamba": (
        BASE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
        RECURRENT,
    ),
    "bamba": (
        BASE | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
        RECURRENT,
    ),
    "qwen3_next": (HYBRID, RECURRENT),
    "rwkv": (
        NOBODY | {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 64},
        "RwkvForCausalLM",
    ),
    "deepseek_v3": (MLA, "keys and values of different shapes"),
    "llama4_text": (
        BASE
        | {"head_dim": 8, "num_hidden_layers": 4, "num_local_experts": 2}
        | {"intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "chunked_attention",
    ),
}


@pytest.fixture(autouse=True)
def fresh_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def wide_softmax(monkeypatch):
    """Eager attention rounds its softmax to fp32 whatever the model's dtype; here it must not."""
    real = torch.nn.functional.softmax

    def softmax(x, dim=None, dtype=None, **options):
        return real(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


def path_rows(target, seen, texts):
    """(decoder's row, reference row) of every real tree node of one round, as the model was trained."""
    reach = seen.draft.ancestors()
    for i, request in enumerate(seen.requests):
        for node in range(seen.draft.tokens.shape[1]):
            path = reach[i, node + 1, 1:].nonzero()[:, 0]
            # Slots are in drawing order, and parents come first: so do they on a path.
            text = texts[request] + seen.draft.tokens[i, path].tolist()
            if seen.draft.tokens[i, node] >= 0 and len(text) <= target.max_positions:
                with torch.no_grad():
                    want = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                yield seen.logits[i, node + 1], want


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.ci(
    "llama",
    "mistral, window 6",
    "gpt_oss, sinks, window 6",
    "gemma3, window 6",
    "phi, biased head",
    "phi3, longrope",
)
def test_greedy_is_the_models_own(name, tmp_path, wide_softmax):
    target = load_target(str(save(tmp_path / "model", *WORKS[name])), dtype="float64")
    assert target.dtype == torch.float64
    room = [min(LENGTH, target.max_positions - len(p)) for p in PROMPTS]
    reference = [greedy(target.model, p, n) for p, n in zip(PROMPTS, room, strict=True)]
    assert min(len(set(r)) for r in reference) > 2, "a model that repeats one token tests nothing"

    options = {"max_new_tokens": LENGTH, "sampler": Sampler(0.0)}
    plain_watch, watch = Watch(3), Watch(3)
    plain = generate(target, None, PROMPTS, on_round=plain_watch, **options).outputs
    texts = [p + r for p, r in zip(PROMPTS, reference, strict=True)]
    oracle = Oracle(texts, VOCAB)
    outputs = generate(target, oracle, PROMPTS, plan=TREE, on_round=watch, **options).outputs
    assert [o.tokens for o in plain] == reference
    assert [o.tokens for o in outputs] == reference
    both_happened(outputs)

    for request, prompt in enumerate(PROMPTS):
        want = rows_of(target.model, prompt, reference[request])
        for got in (plain_watch.rows[request], watch.rows[request]):
            torch.testing.assert_close(torch.stack(got), want, rtol=0, atol=EXACT)

    so_far = [list(p) for p in PROMPTS]
    checked = 0
    for number, seen in enumerate(watch.rounds):
        if 0 < number <= 4 or target.max_positions == 20:
            for got, want in path_rows(target, seen, so_far):
                torch.testing.assert_close(got, want, rtol=0, atol=EXACT)
                checked += 1
        for request, emitted in zip(seen.requests, seen.emitted, strict=True):
            so_far[request] += emitted
    assert checked > 20


def both_happened(outputs):
    rounds = [r for o in outputs for r in zip(o.accepted, o.draft_lengths, strict=True)]
    assert sum(a for a, _ in rounds) >= 6, "accepts"
    assert sum(a < o for a, o in rounds) >= 3, "rejects"
    assert any(a > 1 for a, _ in rounds), "several at once"


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.ci("llama", "mistral, window 6")
def test_sampled_is_plain_sampling(name, tmp_path, wide_softmax):
    target = load_target(str(save(tmp_path / "model", *WORKS[name])), dtype="float64")
    sampler = Sampler(0.9, top_k=40, top_p=0.97, repetition_penalty=1.2)
    room = [min(LENGTH, target.max_positions - len(p)) for p in PROMPTS]
    reference = [
        sampled(target.model, p, n, sampler, KeyedCoin(3, [i]))
        for i, (p, n) in enumerate(zip(PROMPTS, room, strict=True))
    ]
    options = {"max_new_tokens": LENGTH, "sampler": sampler, "seed": 3}
    plain = generate(target, None, PROMPTS, **options).outputs
    oracle = Oracle([p + r for p, r in zip(PROMPTS, reference, strict=True)], VOCAB)
    outputs = generate(target, oracle, PROMPTS, plan=TREE, **options).outputs
    assert [o.tokens for o in plain] == reference
    assert [o.tokens for o in outputs] == reference
    both_happened(outputs)


@torch.no_grad()
def sampled(model, prompt, count, sampler, coin):
    """Plain sampling without a cache, from the law and the coin's draw at each position."""
    text, active = list(prompt), torch.ones(1, dtype=torch.bool)
    for position in range(len(prompt), len(prompt) + count):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[0, text] = True
        here = coin.at(np.array([position]), np.array([0]))
        text.append(int(here.draw(sampler.probs(logits, seen), Key(Purpose.TARGET, 0), active)))
    return text[len(prompt) :]


def test_windows_bite_and_are_crossed_several_times(tmp_path):
    """What the sliding families decode differs from what they would without a window."""
    for kind, extra in (("mistral", {}), ("gemma3_text", {"head_dim": 8, "num_hidden_layers": 4})):
        rows = []
        for window in (6, 128):
            options = BASE | extra | {"sliding_window": window}
            target = load_target(str(save(tmp_path / f"{kind}{window}", kind, options)), dtype="float64")
            rows.append(rows_of(target.model, PROMPTS[0], list(range(24)))[-1])
        assert (rows[0] - rows[1]).abs().max() > 1e-3
    assert len(PROMPTS[1]) + LENGTH > 4 * 6


def test_longrope_ends_where_the_longest_row_would_change_the_others(tmp_path):
    target = load_target(str(save(tmp_path / "model", *WORKS["phi3, longrope"])), dtype="float64")
    assert target.max_positions == 20
    short, long = PROMPTS[1], list(range(1, 19))
    options = {"max_new_tokens": 16, "sampler": Sampler(0.0)}
    alone = generate(target, None, [short], **options).outputs[0].tokens
    with_long = generate(target, None, [short, long], **options).outputs
    assert with_long[0].tokens == alone
    assert len(with_long[1].tokens) == 2
    with pytest.raises(UserError, match="context of 20"):
        generate(target, None, [list(range(1, 22))], **options)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_one_line(kind, tmp_path):
    options, reason = REFUSED[kind]
    folder = save(tmp_path / "model", kind, options)
    with pytest.raises(UserError, match=reason) as caught:
        load_target(str(folder), dtype="float32")
    one_line(caught)


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("target")
    assert 20 < len(text) < 400


# -- folders that hold no target ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "auto"),
    [("bert", AutoModelForMaskedLM), ("t5", AutoModelForSeq2SeqLM), ("bart", AutoModelForSeq2SeqLM)],
)
def test_an_encoder_is_no_causal_model(kind, auto, tmp_path):
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4, "d_model": 32}
    folder = save(tmp_path / "model", kind, BASE | heads | {"d_ff": 48, "num_layers": 2}, auto=auto)
    for use in (load_config, load_target):
        with pytest.raises(UserError, match=f"a '{kind}' model is no causal language model") as caught:
            use(str(folder))
        one_line(caught)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_a_quantised_model_is_refused_by_name(method, tmp_path):
    folder = save(tmp_path / "model", "llama", BASE)
    change(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UserError, match=f"quantised with {method}") as caught:
        load_target(str(folder))
    one_line(caught)


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("gpt2", "no such folder.*owner/name"),
        ("a/b/c", "no such folder"),
        ("nobody-we-know/nothing", "couldn't find them in the cached files"),
    ],
)
def test_nothing_there(name, reason):
    for use in (load_config, load_target):
        with pytest.raises(UserError, match=reason) as caught:
            use(name)
        one_line(caught)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json in it") as caught:
        load_target(str(tmp_path))
    one_line(caught)


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "model", "llama", BASE)
    assert load_target("~/model").vocab_size == VOCAB


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


DAMAGE = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no file named model\.safetensors"),
    "cut short": (cut, "deserializing"),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"abc"), "deserializing"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "no type": (lambda f: (f / "config.json").write_text("{}"), "model_type"),
    "unknown type": (lambda f: change(f, model_type="frobnicator"), "frobnicator"),
    "needs code": (lambda f: change(f, model_type="mine", auto_map={"AutoConfig": "x.Y"}), "custom code"),
    "wrong value": (lambda f: change(f, num_hidden_layers="three"), "num_hidden_layers"),
    "wrong size": (lambda f: change(f, hidden_size=64), r"weights do not fit config\.json"),
    "more layers": (lambda f: change(f, num_hidden_layers=4), r"do not fit config\.json \(9 missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_folder_is_one_line(how, tmp_path):
    folder = save(tmp_path / "model", "llama", BASE)
    harm, reason = DAMAGE[how]
    harm(folder)
    with pytest.raises(UserError, match=reason) as caught:
        load_target(str(folder))
    one_line(caught)


@pytest.mark.parametrize("auto", [LlamaModel, LlamaForSequenceClassification])
def test_a_checkpoint_without_a_head_is_not_given_a_random_one(auto, tmp_path):
    config = AutoConfig.for_model("llama", **BASE | {"tie_word_embeddings": False, "pad_token_id": 0})
    auto(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"lm_head\.weight") as caught:
        load_target(str(tmp_path / "model"))
    one_line(caught)


def test_an_unknown_dtype(tmp_path):
    with pytest.raises(UserError, match="choose auto, float32"):
        load_target(str(save(tmp_path / "model", "llama", BASE)), dtype="int8")


# -- the probe notices -------------------------------------------------------------------------


def feed(monkeypatch, change):
    """Alter the positions that the model is given."""
    real = CausalLM._body

    def altered(self, tokens, positions, *rest):
        return real(self, tokens, change(self, positions), *rest)

    monkeypatch.setattr(CausalLM, "_body", altered)


def slots_as_positions(monkeypatch):
    feed(monkeypatch, lambda lm, positions: positions[:, :1] + torch.arange(positions.shape[1]))


def one_length_for_all(monkeypatch):
    """Positions of a batch whose rows are all as long as the longest."""

    def change(lm, positions):
        return positions + (max(lm.lengths) - torch.tensor(lm.lengths))[:, None]

    feed(monkeypatch, change)


def cousins_are_seen(monkeypatch):
    real = CausalLM._mask
    monkeypatch.setattr(
        CausalLM,
        "_mask",
        lambda self, block, *rest: real(
            self, None if block is None else torch.ones_like(block).tril(), *rest
        ),
    )


def no_window(monkeypatch):
    real = CausalLM.__init__

    def init(self, model):
        real(self, model)
        self._window = None

    monkeypatch.setattr(CausalLM, "__init__", init)


def values_left_behind(monkeypatch):
    """Compaction of the keys alone."""
    real = RowStore.keep

    def keep(self, counts, slots=None):
        values = self._data[:, 1].clone()
        real(self, counts, slots)
        self._data[:, 1] = values

    monkeypatch.setattr(RowStore, "keep", keep)


def first_layer_only(monkeypatch):
    real = RowStore.keep

    def keep(self, counts, slots=None):
        others = self._data[1:].clone()
        real(self, counts, slots)
        self._data[1:] = others

    monkeypatch.setattr(RowStore, "keep", keep)


def one_slot_off(monkeypatch):
    real = RowStore.keep
    monkeypatch.setattr(
        RowStore,
        "keep",
        lambda self, counts, slots=None: real(
            self, counts, None if slots is None else (slots - 1).clamp_min(0)
        ),
    )


SABOTAGE = {
    slots_as_positions: "llama",
    one_length_for_all: "llama",
    cousins_are_seen: "llama",
    no_window: "mistral, window 6",
    no_compaction: "llama",
    values_left_behind: "llama",
    first_layer_only: "llama",
    one_slot_off: "llama",
}


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda f: f.__name__)
def test_the_probe_notices(sabotage, tmp_path, monkeypatch):
    folder = str(save(tmp_path / "model", *WORKS[SABOTAGE[sabotage]]))
    with monkeypatch.context() as inner:
        sabotage(inner)
        with pytest.raises(
            UserError, match="cannot be decoded losslessly here: the probe found wrong rows"
        ) as caught:
            load_target(folder)
    one_line(caught)
    load_target(folder)  # a failure is not remembered, and nothing of the sabotage is left


@pytest.mark.parametrize(
    ("name", "part", "nothing"),
    [
        ("cohere, logit scale", "scale", 1.0),
        ("granite, logits scaled", "scale", 1.0),
        ("gemma2, soft caps, eager", "softcap", None),
        ("phi, biased head", "bias", None),
    ],
)
def test_the_probe_notices_a_head_that_lacks_something(name, part, nothing, tmp_path, monkeypatch):
    folder = str(save(tmp_path / "model", *WORKS[name]))
    assert getattr(load_target(folder).head, part) is not nothing

    def partial(**values):
        return Head(**values | {part: nothing})

    monkeypatch.setattr("decode.model.causal_lm.Head", partial)
    with pytest.raises(UserError, match="logits differ from its head") as caught:
        load_target(folder)  # though the class is remembered as probed
    one_line(caught)


def test_the_probe_is_run_once(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", "llama", BASE)
    runs = []
    real = probe_module._compare
    monkeypatch.setattr(probe_module, "_compare", lambda twin: runs.append(1) or real(twin))
    load_target(str(folder))
    load_target(str(folder))
    assert len(runs) == 1
    load_target(str(save(tmp_path / "other", "llama", BASE | {"attention_bias": True})))
    assert len(runs) == 2, "another configuration is another model"
    eager = Target(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))
    probe_module.probe(eager)
    assert len(runs) == 3, "another kernel reads another mask"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    load_target(str(folder))
    assert len(runs) == 4


def test_the_probe_leaves_the_run_alone(tmp_path):
    """It draws random weights, but not from the run's generator."""
    folder = str(save(tmp_path / "model", "llama", BASE))
    torch.manual_seed(7)
    load_target(folder)
    with_probe = torch.rand(3)
    torch.manual_seed(7)
    load_target(folder)
    assert torch.equal(with_probe, torch.rand(3))
