"""A model's own cache, under the names that transformers has given it."""

import pytest
import torch
from families import BASE, PROMPTS
from scripted import greedy
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, MistralModel

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.own_cache import NAMES, OwnCache, cache_name
from decode.model.target import Target
from decode.sampling import Sampler

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
    cache = OwnCache(base(), torch.zeros(1))
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
        OwnCache(base(), torch.zeros(1)).read(torch.tensor([[1]]))


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
