"""Logits of the target that are not finite end decoding and replay in one line that says where."""

import copy
from itertools import islice

import pytest
import torch
from scripted import Oracle

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.finite import broken_slot, check_logits, check_states
from decode.generation.generate import generate, stream
from decode.model.abilities import Abilities
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

V, NEW = 50, 12
PROMPTS = [[1, 2, 3], [4, 5], [6]]
GREEDY, ONE = Sampler(0.0), Sampler(1.0)
PLANS = {
    "plain": None,
    "chain": Plan(3),
    "tree": Plan(3, 3, 6),
    "sampled": Plan(3, proposal="sampled", rule="token"),
    "traversal": Plan(3, proposal="sampled", rule="traversal"),
    "hybrid": Plan(3, 3, 6, "hybrid"),
}


@pytest.fixture(scope="module")
def whole(tiny_target) -> Target:
    return tiny_target(V, hidden=16)


def spoilt(target: Target, part: str, row: int | None = None, value: float = torch.nan) -> Target:
    """A copy with such a value in a row of a weight, or in all of it."""
    model = copy.deepcopy(target.model)
    weight = model.get_parameter(part).data
    weight[slice(None) if row is None else row] = value
    return Target(model, target.taps)


def texts_of(target: Target, sampler: Sampler) -> list[list[int]]:
    return [o.tokens for o in generate(target, None, PROMPTS, max_new_tokens=NEW, sampler=sampler).outputs]


def first_break(texts: list[list[int]]) -> tuple[int, int, int]:
    """A token that only one text writes, after some others: (token, its prompt, its number in the text)."""
    for request, text in enumerate(texts):
        others = {t for i, other in enumerate(texts) if i != request for t in [*other, *PROMPTS[i]]}
        for place, token in enumerate(text[:-3]):
            if place > 3 and token not in {*others, *PROMPTS[request], *text[:place]}:
                return token, request, len(PROMPTS[request]) + place + 1
    raise AssertionError("no such token")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampler", [GREEDY, ONE], ids=["T=0", "T=1"])
def test_broken_row_ends_generation_and_is_named(whole, make_drafter, plan, sampler):
    if plan in ("sampled", "traversal") and not sampler.temperature:
        pytest.skip("drafts nothing else than a chain")
    drafter = None if PLANS[plan] is None else make_drafter("eagle", whole)
    options = {"max_new_tokens": NEW, "sampler": sampler, "plan": PLANS[plan]}
    texts = [o.tokens for o in generate(whole, drafter, PROMPTS, **options).outputs]
    token, request, place = first_break(texts)
    target = spoilt(whole, "model.embed_tokens.weight", token)
    with pytest.raises(UserError, match="the target's logits are not finite after token") as error:
        generate(target, drafter, PROMPTS, **options)
    if plan == "plain":  # a drafter may draft the token earlier
        assert f"after token {place} of prompt {request} (its embedding is not)" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("model.layers.1.mlp.down_proj.weight", "the output of layer 1 is the first"),
        ("model.layers.0.self_attn.v_proj.weight", "the output of layer 0 is the first"),
        ("lm_head.weight", "the head's product is the first that is not"),
    ],
)
def test_first_layer_that_is_not_finite_is_named(whole, part, said, value):
    target = spoilt(whole, part, value=value)
    with pytest.raises(UserError, match=r"after token 3 of prompt 0 \(") as error:
        generate(target, None, PROMPTS, max_new_tokens=3, sampler=GREEDY)
    assert said in str(error.value)
    assert target.taps == whole.taps


def test_broken_decoder_is_told_from_a_broken_model(whole, monkeypatch):
    extend = Target.extend

    def broken(self, tokens, draft=None):
        found = extend(self, tokens, draft)
        return found if draft is None else found._replace(last=found.last * torch.nan)

    monkeypatch.setattr(Target, "extend", broken)
    with pytest.raises(UserError, match="those of a plain pass over the same text are"):
        generate(whole, None, PROMPTS, max_new_tokens=3, sampler=GREEDY)


def test_stream_and_own_cache_end_where_the_logits_are_not_finite(whole):
    texts = texts_of(whole, GREEDY)
    token, request, place = first_break(texts)
    target = spoilt(whole, "model.embed_tokens.weight", token)
    pieces = stream(target, None, PROMPTS[request], max_new_tokens=NEW, sampler=GREEDY)
    before = texts[request][: place - len(PROMPTS[request])]
    assert [token for piece in islice(pieces, len(before)) for token in piece.tokens] == before
    with pytest.raises(UserError, match=f"after token {place} of prompt 0"):
        next(pieces)
    options = {"max_new_tokens": NEW, "sampler": GREEDY}
    for abilities, more, name in (
        (Abilities(decode="states", own_cache=True), {}, request),
        (Abilities(decode="states", own_cache=True), {"batch_size": 1}, request),
        (Abilities(), {"requests": [f"id-{i}" for i in range(3)]}, f"id-{request}"),
    ):
        target.abilities = abilities
        with pytest.raises(UserError, match=f"after token {place} of prompt {name} "):
            generate(target, None, PROMPTS, **options, **more)


@pytest.mark.parametrize("sampler", [GREEDY, ONE], ids=["T=0", "T=1"])
@pytest.mark.parametrize("part", ["model.embed_tokens.weight", "lm_head.weight"])
def test_replay_ends_where_states_or_logits_are_not_finite(whole, make_drafter, sampler, part):
    drafter = make_drafter("eagle", whole)
    rollouts = [Rollout(p, a) for p, a in zip(PROMPTS, texts_of(whole, sampler), strict=True)]
    token = rollouts[1].answer[2]
    target = spoilt(whole, part, token)
    with pytest.raises(UserError, match=r"not finite after token .* of a prompt with its stored answer"):
        replay(target, drafter, rollouts, [Plan(2)], sampler)


def test_masked_tokens_and_padding_are_no_fault():
    logits = torch.randn(3, 4, 7)
    draft = Draft.chain(torch.tensor([[1, 2, 3], [1, 2, PAD], [1, PAD, PAD]]))
    logits[0, :, 5] = -torch.inf
    logits[1, 3], logits[2, 2:] = torch.nan, torch.nan
    assert broken_slot(logits, draft).tolist() == [0, 0, 0]
    logits[0, 2], logits[1, 2, 0], logits[2, 0, 6] = -torch.inf, torch.nan, torch.inf
    assert broken_slot(logits, draft).tolist() == [3, 3, 1]


def test_broken_node_of_a_draft_is_named(whole):
    """It spoils its whole row: attention multiplies what it must not see by 0, and 0 times NaN is NaN."""
    texts = texts_of(whole, GREEDY)
    unused = next(t for t in range(V) if t not in {x for text in [*texts, *PROMPTS] for x in text})

    class Wrong(Oracle):
        def propose(self, state, *args):
            return Draft.chain(torch.full((len(state), 2), unused))

    target = spoilt(whole, "model.embed_tokens.weight", unused)
    with pytest.raises(UserError, match=r"after token 5 of prompt 0 and its draft \(its embedding"):
        generate(target, Wrong([], V), PROMPTS, max_new_tokens=NEW, sampler=GREEDY, plan=Plan(2))


def test_place_of_broken_states_and_logits_is_named(whole):
    texts, states = [[1, 2], [3, 4, 5, 6]], torch.zeros(2, 4, 16)
    states[0, 2:] = torch.nan
    check_states(whole, states, texts, "a text")
    states[1, 2, 7] = torch.inf
    with pytest.raises(UserError, match="after token 3 of a text"):
        check_states(whole, states, texts, "a text")
    logits = torch.randn(2, V)
    logits[0, 3] = -torch.inf
    check_logits(whole, logits, texts[1], 3, "a text")
    logits[1] = -torch.inf
    with pytest.raises(UserError, match="after token 4 of a text"):
        check_logits(whole, logits, texts[1], 3, "a text")
