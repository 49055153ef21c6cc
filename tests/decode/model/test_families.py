"""Model families through the front door: they decode losslessly, or one line says why not."""

import json

import pytest
import torch
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
from decode.model.causal_lm import CausalLM
from decode.model.head import Head
from decode.model.load import load_config, load_target
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

EXACT = 1e-9  # fp64, absolute
TREE = Plan(depth=4, width=3, nodes=12)
RWKV = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 64}
CHUNKED = {"num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
REFUSED = {  # test_abilities.py has others
    "bloom": (SMALL_GPT | {"hidden_size": 32}, "BloomForCausalLM cannot be decoded losslessly"),
    "mamba": (BASE | {"state_size": 8}, "state cannot be rolled back"),
    "rwkv": (NOBODY | RWKV, "RwkvForCausalLM"),
    "llama4_text": (BASE | CHUNKED | {"attention_chunk_size": 8}, "chunked_attention"),
}


@pytest.fixture(autouse=True)
def fresh_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def llama(tmp_path):
    return save(tmp_path / "model", "llama", BASE)


@pytest.fixture
def wide_softmax(monkeypatch):
    """Eager attention rounds its softmax to fp32 whatever the model's dtype; here it must not."""
    real = torch.nn.functional.softmax

    def softmax(x, dim=None, dtype=None, **options):
        return real(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


def check_refused(load, reason):
    with pytest.raises(UserError, match=reason) as caught:
        load()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("target")
    assert 20 < len(text) < 400


# -- families that decode ----------------------------------------------------------------------


def compare_paths(target, seen, texts):
    """Check the row of every real tree node of one round against a plain pass; returns how many there are."""
    reach, count = seen.draft.ancestors(), 0
    for i, request in enumerate(seen.requests):
        for node in (seen.draft.tokens[i] >= 0).nonzero()[:, 0].tolist():
            path = reach[i, node + 1, 1:].nonzero()[:, 0]
            # Slots are in drawing order, and parents come first: so do they on a path.
            text = texts[request] + seen.draft.tokens[i, path].tolist()
            if len(text) <= target.max_positions:
                with torch.no_grad():
                    want = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(seen.logits[i, node + 1], want, rtol=0, atol=EXACT)
                count += 1
    return count


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.ci(
    *("llama", "mistral, window 6", "gpt_oss, sinks, window 6", "gemma3, window 6"),
    *("phi, biased head", "phi3, longrope"),
)
def test_greedy_text_and_rows_are_the_models_own(name, tmp_path, wide_softmax):
    target = load_target(str(save(tmp_path / "model", *WORKS[name])), dtype="float64")
    assert target.dtype == torch.float64
    reference = [greedy(target.model, p, min(LENGTH, target.max_positions - len(p))) for p in PROMPTS]
    assert min(len(set(r)) for r in reference) > 2, "a model that repeats one token tests nothing"
    oracle = Oracle([p + r for p, r in zip(PROMPTS, reference, strict=True)], VOCAB)
    watch = {}
    for drafter, plan in ((None, None), (oracle, TREE)):
        watch[drafter] = Watch(3)
        options = {"max_new_tokens": LENGTH, "sampler": Sampler(0.0), "on_round": watch[drafter]}
        outputs = generate(target, drafter, PROMPTS, plan=plan, **options).outputs
        assert [o.tokens for o in outputs] == reference
        for prompt, answer, rows in zip(PROMPTS, reference, watch[drafter].rows, strict=True):
            want = rows_of(target.model, prompt, answer)
            torch.testing.assert_close(torch.stack(rows), want, rtol=0, atol=EXACT)
    rounds = [r for o in outputs for r in zip(o.accepted, o.draft_lengths, strict=True)]
    assert sum(a for a, _ in rounds) >= 6, "accepts"
    assert sum(a < o for a, o in rounds) >= 3, "rejects"
    assert any(a > 1 for a, _ in rounds), "several at once"
    texts, checked = [list(p) for p in PROMPTS], 0
    for number, seen in enumerate(watch[oracle].rounds):
        if 0 < number <= 4 or target.max_positions == 20:
            checked += compare_paths(target, seen, texts)
        for request, emitted in zip(seen.requests, seen.emitted, strict=True):
            texts[request] += emitted
    assert checked > 20


def test_longrope_ends_where_a_long_row_would_change_the_others(tmp_path):
    target = load_target(str(save(tmp_path / "model", *WORKS["phi3, longrope"])), dtype="float64")
    assert target.max_positions == 20
    short, long = PROMPTS[1], list(range(1, 19))
    options = {"max_new_tokens": 16, "sampler": Sampler(0.0)}
    (single,) = generate(target, None, [short], **options).outputs
    with_long = generate(target, None, [short, long], **options).outputs
    assert with_long[0].tokens == single.tokens
    assert len(with_long[1].tokens) == 2
    with pytest.raises(UserError, match="context of 20"):
        generate(target, None, [list(range(1, 22))], **options)


# -- families and folders that are refused -----------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED)
def test_family_is_refused_in_one_line(kind, tmp_path):
    options, reason = REFUSED[kind]
    folder = str(save(tmp_path / "model", kind, options))
    check_refused(lambda: load_target(folder, dtype="float32"), reason)


@pytest.mark.parametrize("kind", ["bert", "t5", "bart"])
def test_encoder_is_no_causal_model(kind, tmp_path):
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForSeq2SeqLM
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4, "d_model": 32}
    folder = save(tmp_path / "model", kind, BASE | heads | {"d_ff": 48, "num_layers": 2}, auto=auto)
    for load in (load_config, load_target):
        check_refused(lambda load=load: load(str(folder)), f"a '{kind}' model is no causal language model")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "gpt2", "a/b/c", "nobody-we-know/nothing"]
)
def test_missing_model_is_named(name):
    reason = "couldn't find them in the cached files" if "nobody" in name else "no such folder.*owner/name"
    for load in (load_config, load_target):
        check_refused(lambda load=load: load(name), reason)


def test_home_is_expanded(llama, monkeypatch):
    monkeypatch.setenv("HOME", str(llama.parent))
    assert load_target("~/model").vocab_size == VOCAB


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json in it"),
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
def test_damaged_folder_is_refused_in_one_line(how, llama):
    harm, reason = DAMAGE[how]
    harm(llama)
    check_refused(lambda: load_target(str(llama)), reason)


@pytest.mark.parametrize("auto", [LlamaModel, LlamaForSequenceClassification])
def test_checkpoint_without_a_head_is_not_given_a_random_one(auto, tmp_path):
    config = AutoConfig.for_model("llama", **BASE | {"tie_word_embeddings": False, "pad_token_id": 0})
    auto(config).save_pretrained(tmp_path / "model")
    check_refused(lambda: load_target(str(tmp_path / "model")), r"lm_head\.weight")


def test_unknown_dtype_is_refused(llama):
    check_refused(lambda: load_target(str(llama), dtype="int8"), "dtype=int8: choose auto, float32")


# -- what the probe notices --------------------------------------------------------------------


def positions_are(change):
    real = CausalLM._body
    return lambda patch: patch.setattr(
        CausalLM, "_body", lambda lm, tokens, positions, *rest: real(lm, tokens, change(lm, positions), *rest)
    )


def cousins_are_seen(patch):
    real = CausalLM._mask

    def mask(lm, block, *rest):
        return real(lm, None if block is None else torch.ones_like(block).tril(), *rest)

    patch.setattr(CausalLM, "_mask", mask)


def no_window(patch):
    real = CausalLM.__init__

    def init(lm, model):
        real(lm, model)
        lm._window = None

    patch.setattr(CausalLM, "__init__", init)


SABOTAGE = {
    "slots as positions": positions_are(
        lambda lm, positions: positions[:, :1] + torch.arange(positions.shape[1])
    ),
    "one length for all": positions_are(
        lambda lm, positions: positions + (max(lm.lengths) - torch.tensor(lm.lengths))[:, None]
    ),
    "cousins are seen": cousins_are_seen,
    "no window": no_window,
    "no compaction": no_compaction,
}


@pytest.mark.parametrize("how", SABOTAGE)
def test_probe_notices(how, tmp_path, monkeypatch):
    folder = str(save(tmp_path / "model", *WORKS["mistral, window 6" if how == "no window" else "llama"]))
    with monkeypatch.context() as patch:
        SABOTAGE[how](patch)
        check_refused(lambda: load_target(folder), "losslessly here: the probe found wrong rows")
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
def test_probe_notices_a_head_that_lacks_something(name, part, nothing, tmp_path, monkeypatch):
    folder = str(save(tmp_path / "model", *WORKS[name]))
    assert getattr(load_target(folder).head, part) is not nothing
    monkeypatch.setattr("decode.model.causal_lm.Head", lambda **values: Head(**values | {part: nothing}))
    # Though the class is remembered as probed
    check_refused(lambda: load_target(folder), "logits differ from its head")


def test_probe_runs_once_for_a_configuration_kernel_and_source(llama, tmp_path, monkeypatch):
    runs = []
    real = probe_module._compare
    monkeypatch.setattr(probe_module, "_compare", lambda twin: runs.append(1) or real(twin))
    load_target(str(llama))
    load_target(str(llama))
    assert len(runs) == 1
    load_target(str(save(tmp_path / "other", "llama", BASE | {"attention_bias": True})))
    assert len(runs) == 2
    eager = Target(AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager"))
    probe_module.probe(eager)
    assert len(runs) == 3
    monkeypatch.setattr(probe_module.inspect, "getsource", lambda module: "of another version")
    probe_module.probe(eager)
    assert len(runs) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    probe_module.probe(eager)
    assert len(runs) == 5


def test_probe_draws_nothing_from_the_runs_generator(llama):
    torch.manual_seed(7)
    load_target(str(llama))
    with_probe = torch.rand(3)
    torch.manual_seed(7)
    load_target(str(llama))
    assert torch.equal(with_probe, torch.rand(3))
