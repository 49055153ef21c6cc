"""What can be done with a target here: train, replay, decode; and why not; and a model's own cache."""

import pytest
import torch
from elsewhere import REASONS, TARGETS
from families import BASE, NOBODY, VOCAB, save
from safetensors.torch import load_file
from scripted import greedy
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, MistralModel

from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.model import probe as probe_module
from decode.model.abilities import Abilities
from decode.model.load import load_model, load_target
from decode.model.own_cache import NAMES, OwnCache, cache_name
from decode.model.target import Target
from decode.sampling import Sampler

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPTS = [[5, 9, 2, 7, 3, 11, 8], [4], [6, 10, 12]]
RWKV = NOBODY | {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 64}
GREEDY = {"max_new_tokens": 12, "sampler": Sampler(0.0)}


@pytest.fixture
def hybrid(tmp_path):
    return str(TARGETS["hybrid"](tmp_path / "target"))


@pytest.mark.parametrize("kind", TARGETS)
def test_target_that_an_engine_decodes_is_trained_for_and_replayed(kind, tmp_path):
    folder = str(TARGETS[kind](tmp_path / "target"))
    with pytest.raises(UserError, match=f"{REASONS[kind]}.*an engine decodes it") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)
    target = load_target(folder, decodes=False)
    able = target.abilities
    assert (able.train, able.replay, able.own_cache) == ("", "", kind != "fp8")
    plain = generate(target, None, PROMPTS, **GREEDY).outputs
    assert [o.tokens for o in plain] == [greedy(target.model, p, 12) for p in PROMPTS]
    with pytest.raises(UserError, match=REASONS[kind]):
        generate(target, object(), PROMPTS, **GREEDY)
    with pytest.raises(UserError, match=REASONS[kind]):
        next(stream(target, object(), PROMPTS[0], **GREEDY))


def test_ordinary_target_can_do_all(tmp_path):
    target = load_target(str(save(tmp_path / "model", "llama", BASE)), decodes=False)
    assert target.abilities == Abilities()


def test_fp8_weights_are_read_as_their_products(tmp_path):
    folder = TARGETS["fp8"](tmp_path / "target")
    stored, target = load_file(folder / "model.safetensors"), load_target(str(folder), decodes=False)
    for name, weight in target.model.state_dict().items():
        scale = stored.get(f"{name}_scale_inv")
        expected = stored[name].float() * (1 if scale is None else scale)
        assert torch.equal(weight.float(), expected.to(weight.dtype).float()), name
    assert target.fingerprint() == load_target(str(folder), decodes=False).fingerprint()


def test_quantised_draft_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"drafter\.path=.*quantised with fp8; use the unquantised weights"):
        load_model(str(TARGETS["fp8"](tmp_path / "target")), what="drafter.path")


def test_model_without_a_cache_writes_no_answers(tmp_path):
    target = load_target(str(save(tmp_path / "model", "rwkv", RWKV)), decodes=False)
    assert not target.abilities.train
    assert "no cache" in target.abilities.replay
    with pytest.raises(UserError, match=r"cannot write answers here.*rollout=openai"):
        generate(target, None, PROMPTS, **GREEDY)


# -- the probe notices -------------------------------------------------------------------------


def other_row(monkeypatch):
    monkeypatch.setattr(OwnCache, "select", lambda self, rows: None)


def forgets(monkeypatch):
    real = OwnCache.read

    def read(self, tokens):
        self._cache = None
        return real(self, tokens)

    monkeypatch.setattr(OwnCache, "read", read)


@pytest.mark.parametrize("sabotage", [other_row, forgets], ids=lambda f: f.__name__)
def test_wrong_cache_prevents_replay(sabotage, hybrid, monkeypatch):
    with monkeypatch.context() as inner:
        sabotage(inner)
        able = load_target(hybrid, decodes=False).abilities
    assert not able.train
    assert able.replay.startswith("the probe ")
    assert not load_target(hybrid, decodes=False).abilities.replay


def test_model_that_reads_ahead_is_refused(hybrid, monkeypatch):
    """As an encoder does, or one whose state takes padding in."""
    real = probe_module._small_copy

    def both_ways(lm):
        small = real(lm)
        body = small.base.forward

        def forward(input_ids, **options):
            out = body(input_ids=input_ids, **options)
            out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
            return out

        small.base.forward = forward
        return small

    monkeypatch.setattr(probe_module, "_small_copy", both_ways)
    with pytest.raises(UserError, match="cannot be decoded losslessly here"):
        load_target(hybrid, decodes=False)


# -- a model's own cache -----------------------------------------------------------------------------


REAL = cache_name(MistralModel)  # in the installed transformers
OLD = {"past_key_values", "cache_params"}


class Sums:
    """A cache that is changed in place: the sum of each row's ids."""

    def __init__(self, rows):
        self.sums = torch.zeros(rows)

    def reorder_cache(self, index):
        self.sums = self.sums[index]


class Output(dict):
    """As a model returns it."""

    last_hidden_state = property(lambda self: self["last_hidden_state"])


class Aliased(Output):
    """An output of 5.24, in which both old names are aliases of `cache`."""

    def get(self, name, default=None):
        return super().get("cache" if name in OLD else name, default)

    def __getitem__(self, name):
        return super().__getitem__("cache" if name in OLD else name)


class Recurrent(nn.Module):
    """Adds up ids, in a cache that it takes and returns."""

    def run(self, input_ids, cache, output, name):
        cache = Sums(len(input_ids)) if cache is None else cache
        sums = cache.sums[:, None] + input_ids.cumsum(1)
        cache.sums = sums[:, -1]
        return output(last_hidden_state=sums[..., None], **{name: cache})


class New(Recurrent):
    def forward(self, input_ids, cache=None, use_cache=False, **aliases):
        cache = next(iter(aliases.values()), cache)
        return self.run(input_ids, cache, Aliased, "cache")


class Old(Recurrent):
    def forward(self, input_ids, past_key_values=None, use_cache=False):
        return self.run(input_ids, past_key_values, Output, "past_key_values")


class OldRecurrent(Recurrent):
    def forward(self, input_ids, cache_params=None, use_cache=False):
        return self.run(input_ids, cache_params, Output, "cache_params")


@pytest.mark.parametrize("base", [New, Old, OldRecurrent])
def test_cache_is_reordered_once(base):
    cache = OwnCache(base(), torch.zeros(1, 1))
    cache.read(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    cache.select([2, 0, 1])
    assert cache.read(torch.tensor([[100], [200], [300]])).flatten().tolist() == [111, 203, 307]
    cache.select([1, 2])
    assert cache.read(torch.tensor([[0], [0]])).flatten().tolist() == [203, 307]


class Stateless(nn.Module):
    def forward(self, input_ids, use_cache=False):
        return Output(last_hidden_state=input_ids[..., None])


class Silent(nn.Module):
    def forward(self, input_ids, cache=None, use_cache=False):
        return Output(last_hidden_state=input_ids[..., None])


@pytest.mark.parametrize(("base", "lacks"), [(Stateless, "takes no cache"), (Silent, "returns no cache")])
def test_model_without_a_cache_is_refused(base, lacks):
    with pytest.raises(UserError, match=f"{base.__name__} {lacks}"):
        OwnCache(base(), torch.zeros(1, 1)).read(torch.tensor([[1]]))


class Only(MistralModel):
    """Takes its cache under one name and no other."""

    def run(self, input_ids, cache, more):
        assert not {*NAMES} & {*more}, "an old name"
        return MistralModel.forward(self, input_ids, **{REAL: cache}, **more)


class OnlyCache(Only):
    def forward(self, input_ids=None, cache=None, **more):
        return self.run(input_ids, cache, more)


class OnlyValues(Only):
    def forward(self, input_ids=None, past_key_values=None, **more):
        return self.run(input_ids, past_key_values, more)


@pytest.mark.parametrize("base", [OnlyCache, OnlyValues])
def test_decoder_passes_its_cache_under_the_name_of_the_class(base, monkeypatch):
    monkeypatch.setattr("decode.model.causal_lm.Fused.of", lambda *parts: None)
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**BASE, sliding_window=6)).double().eval()
    wanted = greedy(model, PROMPTS[0], 8)
    model.base_model.__class__ = base
    outputs = generate(Target(model), None, PROMPTS[:1], max_new_tokens=8, sampler=Sampler(0.0)).outputs
    assert outputs[0].tokens == wanted
