"""A text piece by piece: the same loop as `generate`, paused after every round."""

import pytest
import torch
from exact import SampledChains
from scripted import Oracle, greedy

from decode.errors import UserError
from decode.generation import loop
from decode.generation.generate import generate, stream
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

VOCAB, LENGTH = 23, 20
PROMPT, OTHER = [5, 9, 2, 7, 3], [4, 1]
PLANS = {
    "plain": Plan(),
    "chain": Plan(depth=4),
    "tree": Plan(depth=4, width=3, nodes=9),
    "sampled": Plan(depth=3, proposal="sampled"),
}
GREEDY = Sampler(0.0)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return tiny_target(vocab=VOCAB, hidden=16)


@pytest.fixture(scope="module")
def text(target):
    return PROMPT + greedy(target.model, PROMPT, LENGTH)


class Seen:
    """A drafter whose drafts are kept, with the mode it ran in."""

    def __init__(self, drafter):
        self.drafter, self.drafts, self.modes = drafter, [], []
        self.new_state, self.select, self.traits = drafter.new_state, drafter.select, drafter.traits

    def advance(self, *args):
        self.modes.append(torch.is_inference_mode_enabled())
        self.drafter.advance(*args)

    def propose(self, *args):
        self.drafts.append(self.drafter.propose(*args))
        self.modes.append(torch.is_inference_mode_enabled())
        return self.drafts[-1]


def drafter(kind, text):
    if kind == "sampled":
        return Seen(SampledChains(VOCAB))
    return None if kind == "plain" else Seen(Oracle([text], VOCAB, branches=4 if kind == "tree" else 0))


def counted(output):
    return (
        output.tokens,
        output.emitted,
        output.accepted,
        output.draft_lengths,
        output.drafted,
        output.stopped,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", PLANS)
def test_pieces_joined_are_what_generate_gives(target, text, kind, temperature):
    options = {"max_new_tokens": LENGTH, "sampler": Sampler(temperature), "plan": PLANS[kind], "seed": 3}
    stop = [text[-4]]
    run = generate(target, drafter(kind, text), [OTHER, PROMPT], requests=["b", "a"], stop=stop, **options)
    pieces = list(stream(target, drafter(kind, text), PROMPT, request="a", stop=stop, **options))
    assert [t for piece in pieces for t in piece.tokens] == run.outputs[1].tokens
    assert counted(pieces[-1].output) == counted(run.outputs[1])
    assert [len(piece.tokens) for piece in pieces[1:]] == run.outputs[1].emitted
    assert len(pieces[0].tokens) == 1, "the prefill's"
    assert pieces[-1].output.tau == pytest.approx((len(run.outputs[1].tokens) - 1) / (len(pieces) - 1))


def test_samples_of_a_request_differ(target):
    options = {"max_new_tokens": LENGTH, "sampler": Sampler(1.0)}
    first, again, other = (list(stream(target, None, PROMPT, sample=s, **options)) for s in (0, 0, 1))
    assert first[-1].output.tokens == again[-1].output.tokens != other[-1].output.tokens


@pytest.mark.parametrize("kind", ["chain", "tree", "sampled"])
def test_drafted_tokens_are_told_from_the_targets_own(target, text, kind):
    """Each round: first those of the draft, then at most one that is not, and only an end cuts it."""
    proposer, sampler = drafter(kind, text), Sampler(2.0) if kind == "sampled" else GREEDY
    pieces = list(stream(target, proposer, PROMPT, max_new_tokens=LENGTH, sampler=sampler, plan=PLANS[kind]))
    assert pieces[0].drafted == [False], "the prefill's"
    assert len(proposer.drafts) == len(pieces) - 1
    for number, (piece, draft) in enumerate(zip(pieces[1:], proposer.drafts, strict=True)):
        accepted = sum(piece.drafted)
        assert accepted == min(piece.output.accepted[number], len(piece.tokens))
        assert piece.drafted == [True] * accepted + [False] * (len(piece.tokens) - accepted)
        assert set(piece.tokens[:accepted]) <= set(draft.tokens[0].tolist())
        assert piece is pieces[-1] or len(piece.tokens) == accepted + 1
    drafted = [mark for piece in pieces for mark in piece.drafted]
    assert 3 < sum(drafted) < LENGTH - 3


def test_plain_decoding_drafts_nothing(target, text):
    pieces = list(stream(target, None, PROMPT, max_new_tokens=5, sampler=GREEDY))
    assert [piece.tokens for piece in pieces] == [[token] for token in text[5:10]]
    assert not any(piece.drafted[0] for piece in pieces)


def test_inference_mode_stays_inside(target, text):
    proposer = drafter("tree", text)
    consumer = []
    for _ in stream(target, proposer, PROMPT, max_new_tokens=LENGTH, sampler=GREEDY, plan=PLANS["tree"]):
        consumer.append(torch.is_inference_mode_enabled() or not torch.is_grad_enabled())
        weight = torch.ones(2, requires_grad=True)
        (weight * weight).sum().backward()
        assert weight.grad is not None
    assert len(consumer) > 3
    assert not any(consumer)
    assert len(proposer.modes) > 6
    assert all(proposer.modes)


def test_nothing_is_decoded_ahead(target, text):
    proposer = drafter("chain", text)
    pieces = stream(target, proposer, PROMPT, max_new_tokens=LENGTH, sampler=GREEDY, plan=PLANS["chain"])
    assert len(proposer.modes) == 0
    next(pieces)
    assert len(proposer.drafts) == 0
    next(pieces)
    assert len(proposer.drafts) == 1


@pytest.mark.parametrize("after", [0, 1, 3])
def test_closing_early_leaves_nothing_behind(target, text, after):
    options = {"max_new_tokens": LENGTH, "sampler": GREEDY, "plan": PLANS["tree"]}
    pieces = stream(target, drafter("tree", text), PROMPT, **options)
    for _ in range(after):
        next(pieces)
    pieces.close()
    assert not torch.is_inference_mode_enabled()
    assert list(pieces) == []
    assert not any(layer._forward_pre_hooks for layer in target.layers)
    run = generate(target, drafter("tree", text), [PROMPT], **options)
    assert run.outputs[0].tokens == text[len(PROMPT) :]


def test_an_error_leaves_the_mode_and_ends_the_stream(target, text):
    proposer = drafter("chain", text)
    pieces = stream(target, proposer, PROMPT, max_new_tokens=LENGTH, sampler=GREEDY, plan=PLANS["chain"])
    next(pieces)
    proposer.drafter.propose = None
    with pytest.raises(TypeError):
        next(pieces)
    assert not torch.is_inference_mode_enabled()
    assert list(pieces) == []


def test_a_target_writes_one_text_at_a_time(target, text):
    """A stream that lost its cache to another says so instead of going on in the other's."""
    first, second = (
        stream(target, drafter("chain", text), p, max_new_tokens=LENGTH, sampler=GREEDY, plan=PLANS["chain"])
        for p in (PROMPT, OTHER)
    )
    next(first)
    began = next(second)
    with pytest.raises(UserError, match="another text"):
        next(first)
    rest = [token for piece in second for token in piece.tokens]
    assert began.tokens + rest == greedy(target.model, OTHER, LENGTH)


def test_what_the_consumer_does_is_not_timed(target, text, monkeypatch):
    """A clock that only the consumer moves."""
    clock = [0.0]
    monkeypatch.setattr(loop.Loop, "now", lambda self: clock[0])
    for piece in stream(target, None, PROMPT, max_new_tokens=LENGTH, sampler=GREEDY):
        assert piece.times.total == piece.times.prefill == piece.output.ttft == 0
        clock[0] += 100.0


def test_times_grow_with_the_pieces(target, text):
    totals = [p.times.total for p in stream(target, None, PROMPT, max_new_tokens=4, sampler=GREEDY)]
    assert totals[0] == 0, "the prefill is no part of them"
    assert totals == sorted(set(totals))


@pytest.mark.parametrize(("prompt", "said"), [([], "empty"), ([1] * 64, "context of 64")])
def test_a_prompt_that_cannot_be_decoded_is_refused_at_once(target, prompt, said):
    with pytest.raises(UserError, match=said):
        stream(target, None, prompt, max_new_tokens=4, sampler=GREEDY)
