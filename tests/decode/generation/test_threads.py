"""Threads that decode with one target take turns: it has one cache and one set of hooks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.sampling import Sampler

V, NEW = 30, 10
PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = Sampler(0.0)
SOON = 0.3  # seconds in which the other thread would have begun, if nothing held it


@pytest.fixture
def target(tiny_target):
    return tiny_target(V, hidden=16)


def text(target, prompt, drafter=None, **options):
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
        """Results of both."""
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(first)
            assert self.inside.wait(10)
            two = pool.submit(second)
            return one.result(), two.result()


@pytest.mark.parametrize("shared", ["target", "model"])
def test_two_threads_get_their_own_texts(target, make_drafter, monkeypatch, shared):
    drafter = make_drafter("eagle", target)
    other = target if shared == "target" else Target(target.model, [LAST])
    expected = [text(target, prompt) for prompt in PROMPTS]
    meeting = Meeting(monkeypatch)
    found = meeting.run(
        lambda: text(target, PROMPTS[0], drafter, plan=Plan(3)), lambda: text(other, PROMPTS[1])
    )
    assert list(found) == expected
    turns = [a for a, b in zip(meeting.passes, [None, *meeting.passes], strict=False) if a != b]
    assert len(turns) == 2, "the passes of two texts were mixed"


def test_stream_interrupted_by_another_thread_is_refused(target):
    pieces = stream(target, None, PROMPTS[0], max_new_tokens=NEW, sampler=GREEDY)
    next(pieces)
    thread = threading.Thread(target=text, args=(target, PROMPTS[1]))
    thread.start()  # it need not wait for a stream that nobody reads
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(UserError, match="the target has started another text"):
        next(pieces)


def test_taps_are_those_of_the_streams_drafter(target, make_drafter):
    """Set when the stream begins; where they are changed later, it is refused."""
    drafter = make_drafter("eagle", target)
    options = {"max_new_tokens": NEW, "sampler": GREEDY, "plan": Plan(2)}
    pieces = stream(target, drafter, PROMPTS[0], **options)
    target.tap(())
    text(target, PROMPTS[1])
    assert [t for piece in pieces for t in piece.tokens] == text(target, PROMPTS[0])
    pieces = stream(target, drafter, PROMPTS[0], **options)
    next(pieces)
    target.tap(())
    with pytest.raises(UserError, match="finish the stream before changing taps"):
        next(pieces)


def test_call_from_within_a_round_is_refused(target):
    with pytest.raises(UserError, match="the target has started another text"):
        text(target, PROMPTS[0], on_round=lambda _: text(target, PROMPTS[1]))
