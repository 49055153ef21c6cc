"""`stream` gives the text of `generate` piece by piece; threads that decode with one target take turns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exact import SampledChains
from scripted import Oracle, greedy

from decode.errors import UserError
from decode.generation import loop
from decode.generation.generate import generate, stream
from decode.model.target import LAST, Target
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


def pieces_of(target, drafter=None, prompt=PROMPT, sampler=GREEDY, length=LENGTH, **options):
    return stream(target, drafter, prompt, max_new_tokens=length, sampler=sampler, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", PLANS)
def test_pieces_joined_are_what_generate_gives(target, text, kind, temperature):
    options = {"sampler": Sampler(temperature), "plan": PLANS[kind], "seed": 3, "stop": [text[-4]]}
    both = {"requests": ["b", "a"], "max_new_tokens": LENGTH}
    want = generate(target, drafter(kind, text), [OTHER, PROMPT], **both, **options).outputs[1]
    pieces = list(pieces_of(target, drafter(kind, text), request="a", **options))
    assert [t for piece in pieces for t in piece.tokens] == want.tokens
    for name in ("tokens", "emitted", "accepted", "draft_lengths", "drafted", "stopped"):
        assert getattr(pieces[-1].output, name) == getattr(want, name)
    assert [len(piece.tokens) for piece in pieces[1:]] == want.emitted
    assert len(pieces[0].tokens) == 1, "the prefill's"
    assert pieces[-1].output.tau == pytest.approx((len(want.tokens) - 1) / (len(pieces) - 1))


def test_samples_of_a_request_differ(target):
    first, again, other = (list(pieces_of(target, sampler=Sampler(1.0), sample=s)) for s in (0, 0, 1))
    assert first[-1].output.tokens == again[-1].output.tokens != other[-1].output.tokens


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "sampled"])
def test_drafted_tokens_are_told_from_the_targets_own(target, text, kind):
    """Each round: first those of the draft, then at most one that is not, and only an end cuts it."""
    proposer, sampler = drafter(kind, text), Sampler(2.0) if kind == "sampled" else GREEDY
    pieces = list(pieces_of(target, proposer, sampler=sampler, plan=PLANS[kind]))
    assert pieces[0].drafted == [False], "the prefill's"
    if kind == "plain":
        assert [(p.tokens, p.drafted) for p in pieces] == [([token], [False]) for token in text[5:]]
        return
    assert len(proposer.drafts) == len(pieces) - 1
    for number, (piece, draft) in enumerate(zip(pieces[1:], proposer.drafts, strict=True)):
        accepted = sum(piece.drafted)
        assert accepted == min(piece.output.accepted[number], len(piece.tokens))
        assert piece.drafted == [True] * accepted + [False] * (len(piece.tokens) - accepted)
        assert set(piece.tokens[:accepted]) <= set(draft.tokens[0].tolist())
        assert piece is pieces[-1] or len(piece.tokens) == accepted + 1
    drafted = [mark for piece in pieces for mark in piece.drafted]
    assert 3 < sum(drafted) < LENGTH - 3


def test_inference_mode_stays_inside(target, text):
    proposer = drafter("tree", text)
    consumer = []
    for _ in pieces_of(target, proposer, plan=PLANS["tree"]):
        consumer.append(torch.is_inference_mode_enabled() or not torch.is_grad_enabled())
        weight = torch.ones(2, requires_grad=True)
        (weight * weight).sum().backward()
        assert weight.grad is not None
    assert len(consumer) > 3
    assert not any(consumer)
    assert len(proposer.modes) > 6
    assert all(proposer.modes)


def test_nothing_is_decoded_before_it_is_asked_for(target, text):
    proposer = drafter("chain", text)
    pieces = pieces_of(target, proposer, plan=PLANS["chain"])
    assert not proposer.modes
    next(pieces)
    assert not proposer.drafts
    next(pieces)
    assert len(proposer.drafts) == 1


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stream_closed_early_leaves_nothing(target, text, after):
    pieces = pieces_of(target, drafter("tree", text), plan=PLANS["tree"])
    for _ in range(after):
        next(pieces)
    pieces.close()
    assert not torch.is_inference_mode_enabled()
    assert list(pieces) == []
    assert not any(layer._forward_pre_hooks for layer in target.layers)
    again = pieces_of(target, drafter("tree", text), plan=PLANS["tree"])
    assert [token for piece in again for token in piece.tokens] == text[len(PROMPT) :]


def test_error_leaves_inference_mode_and_ends_the_stream(target, text):
    proposer = drafter("chain", text)
    pieces = pieces_of(target, proposer, plan=PLANS["chain"])
    next(pieces)
    proposer.drafter.propose = None
    with pytest.raises(TypeError):
        next(pieces)
    assert not torch.is_inference_mode_enabled()
    assert list(pieces) == []


def test_times_are_of_decoding_only(target, monkeypatch):
    totals = [piece.times.total for piece in pieces_of(target, length=4)]
    assert totals[0] == 0, "the prefill is no part of them"
    assert totals == sorted(set(totals))
    clock = [0.0]  # which only the consumer moves
    monkeypatch.setattr(loop.Loop, "now", lambda self: clock[0])
    for piece in pieces_of(target):
        assert piece.times.total == piece.times.prefill == piece.output.ttft == 0
        clock[0] += 100.0


@pytest.mark.parametrize(("prompt", "said"), [([], "empty"), ([1] * 64, "context of 64")])
def test_prompt_that_cannot_be_decoded_is_refused_at_once(target, prompt, said):
    with pytest.raises(UserError, match=said):
        pieces_of(target, prompt=prompt)


# -- threads -----------------------------------------------------------------------------------------


NEW = 10
SOON = 0.3  # seconds in which the other thread would have begun, if nothing held it


def text_of(target, prompt, drafter=None, **options):
    found = generate(target, drafter, [prompt], max_new_tokens=NEW, sampler=GREEDY, **options)
    return found.outputs[0].tokens


class Meeting:
    """In the middle of the first thread's round, the second one begins; it is given time to come in."""

    def __init__(self, monkeypatch) -> None:
        self.inside, self.second = threading.Event(), threading.Event()
        self.owner: int | None = None
        self.passes: list[int] = []  # threads, in the order of their passes
        extend = Target.extend

        def met(target, tokens, draft=None):
            me = threading.get_ident()
            self.passes.append(me)
            if self.owner is None:
                self.owner = me
            if me != self.owner:
                self.second.set()
            elif self.passes.count(me) == 3:
                self.inside.set()
                self.second.wait(SOON)
            return extend(target, tokens, draft)

        monkeypatch.setattr(Target, "extend", met)

    def run(self, first, second):
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(first)
            assert self.inside.wait(10)
            two = pool.submit(second)
            return one.result(), two.result()


@pytest.mark.parametrize("shared", ["target", "model"])
def test_two_threads_get_their_own_texts(target, make_drafter, monkeypatch, shared):
    drafter = make_drafter("eagle", target)
    other = target if shared == "target" else Target(target.model, [LAST])
    expected = [text_of(target, prompt) for prompt in (PROMPT, OTHER)]
    meeting = Meeting(monkeypatch)
    found = meeting.run(lambda: text_of(target, PROMPT, drafter, plan=Plan(3)), lambda: text_of(other, OTHER))
    assert list(found) == expected
    turns = [a for a, b in zip(meeting.passes, [None, *meeting.passes], strict=False) if a != b]
    assert len(turns) == 2, "the passes of two texts were mixed"


def test_stream_interrupted_by_another_thread_is_refused(target):
    pieces = stream(target, None, PROMPT, max_new_tokens=NEW, sampler=GREEDY)
    next(pieces)
    thread = threading.Thread(target=text_of, args=(target, OTHER))
    thread.start()  # it need not wait for a stream that nobody reads
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(UserError, match="the target has started another text"):
        next(pieces)


def test_taps_are_those_of_the_streams_drafter(target, make_drafter):
    """Set when the stream begins; where they are changed later, it is refused."""
    drafter = make_drafter("eagle", target)
    options = {"max_new_tokens": NEW, "sampler": GREEDY, "plan": Plan(2)}
    pieces = stream(target, drafter, PROMPT, **options)
    target.tap(())
    text_of(target, OTHER)
    assert [t for piece in pieces for t in piece.tokens] == text_of(target, PROMPT)
    pieces = stream(target, drafter, PROMPT, **options)
    next(pieces)
    target.tap(())
    with pytest.raises(UserError, match="was called in between"):
        next(pieces)


def test_call_from_within_a_round_is_refused(target):
    with pytest.raises(UserError, match="the target has started another text"):
        text_of(target, PROMPT, on_round=lambda _: text_of(target, OTHER))
