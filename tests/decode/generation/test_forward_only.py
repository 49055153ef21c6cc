"""Plain decoding through a model's own cache writes what the speculative loop does without drafts."""

import pytest
from families import BASE, PROMPTS, save
from scripted import AfterThree

from decode.generation.generate import generate
from decode.model.abilities import Abilities
from decode.model.load import load_target
from decode.sampling import Sampler


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(save(tmp_path_factory.mktemp("llama") / "model", "llama", BASE)), "float64")


SAMPLERS = [Sampler(0.0), Sampler(1.0), Sampler(0.8, top_p=0.9), Sampler(0.0, repetition_penalty=1.3)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("more", [{}, {"stop": range(0, 61, 7)}, {"until": AfterThree}], ids=str)
def test_own_cache_gives_the_text_and_rounds_of_the_loop(sampler, more, target, monkeypatch):
    options = {"max_new_tokens": 16, "sampler": sampler, "seed": 3, "requests": ["a", "b", "c"]} | more
    loop = generate(target, None, PROMPTS, **options)
    monkeypatch.setattr(target, "abilities", Abilities(decode="it goes forward", own_cache=True))
    ours = generate(target, None, PROMPTS, **options)
    names = ("tokens", "emitted", "accepted", "draft_lengths", "drafted", "stopped")
    for one, other in zip(ours.outputs, loop.outputs, strict=True):
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
        assert one.ttft > 0
    assert ours.times.total > 0
