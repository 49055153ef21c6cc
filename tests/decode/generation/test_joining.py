"""Requests that join a batch as others end."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import pytest
import torch
from families import BASE, save
from scripted import AfterThree, Oracle, Watch

from decode.depth_policy import DepthPolicy
from decode.generation.generate import generate
from decode.model.abilities import Abilities
from decode.model.load import load_target
from decode.plan import Plan
from decode.row_state import append_rows, select_rows
from decode.sampling import Sampler
from decode.transfer import RowInts

VOCAB = 61
PROMPTS = [[(7 * row + 3 * place) % VOCAB for place in range(1 + row % 5)] for row in range(11)]
STOP = range(0, VOCAB, 9)  # answers of unlike lengths
SAMPLERS = [Sampler(0.0), Sampler(1.0), Sampler(0.8, top_p=0.9), Sampler(1.0, repetition_penalty=1.3)]
PACE = DepthPolicy(0.5, ((1, (1.0, 1.1, 1.2, 1.3)), (4, (1.0, 1.5, 2.0, 2.5))))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(save(tmp_path_factory.mktemp("llama") / "model", "llama", BASE)), "float64")


def run(target, drafter=None, prompts: Sequence[Sequence[int]] = PROMPTS, **options):
    options = {"max_new_tokens": 24, "sampler": Sampler(1.0), "seed": 4, "stop": STOP} | options
    return generate(target, drafter, prompts, **options).outputs


def oracle(target, sampler, right=0.7, branches=0):
    texts = [p + o.tokens for p, o in zip(PROMPTS, run(target, sampler=sampler), strict=True)]
    return Oracle(texts, VOCAB, right=right, branches=branches)


def facts(outputs):
    names = ("tokens", "emitted", "accepted", "draft_lengths", "drafted", "stopped")
    return [[getattr(output, name) for name in names] for output in outputs]


@pytest.mark.parametrize("size", [1, 3, 8, 50])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.covering(pairs=True)
def test_texts_are_those_of_one_batch(target, sampler, size):
    want = run(target, sampler=sampler)
    assert len({len(output.tokens) for output in want}) > 3
    assert facts(run(target, sampler=sampler, batch_size=size)) == facts(want)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("plan", [Plan(3), Plan(3, 3, 8)], ids=lambda p: p.name)
def test_drafted_texts_are_those_of_one_batch(target, plan, size):
    drafter = oracle(target, Sampler(1.0), branches=4 if plan.width > 1 else 0)
    got = run(target, drafter, plan=plan, batch_size=size)
    assert facts(got) == facts(run(target, drafter, plan=plan))
    assert any(sum(output.accepted) for output in got)


def test_drafts_are_longer_with_fewer_rows(target):
    drafter, watch = oracle(target, Sampler(1.0), right=1.0), Watch(len(PROMPTS))
    got = run(target, drafter, plan=Plan(3, adapt=PACE), batch_size=4, on_round=watch)
    assert [output.tokens for output in got] == [output.tokens for output in run(target)]
    rounds = [step for step in watch.rounds if step.draft.depth]
    depth = {len(step.requests): step.draft.depth for step in rounds}
    assert len(depth) > 1
    assert depth[min(depth)] > depth[max(depth)]


@pytest.mark.parametrize(("size", "least"), [(4, 1), (24, 3)])
def test_requests_join_once_an_eighth_of_the_batch_is_free(target, size, least):
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(60)]
    watch, begun, ended, joins = Watch(60), set(), set(), []
    outputs = run(target, prompts=prompts, on_round=watch, batch_size=size)
    left = [len(output.tokens) for output in outputs]
    for step in watch.rounds:
        assert len(step.requests) <= size
        if new := set(step.requests) - begun:
            assert new == set(step.requests), "a prefill runs only those that begin"
            joins.append(len(new))
        else:  # too few rows would begin instead
            waiting = 60 - len(begun)
            assert size - len(begun - ended) < min(least, waiting) or not waiting
        begun |= set(step.requests)
        for request, tokens in zip(step.requests, step.emitted, strict=True):
            left[request] -= len(tokens)
        ended = {request for request in begun if not left[request]}
    assert joins[0] == size
    assert min(joins[:-1]) >= least
    assert sum(joins) == 60


def test_answers_that_end_with_their_first_token(target):
    """Rows that join may have nothing to add to those that run, and all may end at once."""
    greedy = Sampler(0.0)
    first = {output.tokens[0] for output in run(target, sampler=greedy, stop=())}
    stop = sorted(first)[::2]
    for size in (1, 2, 4):
        got = run(target, sampler=greedy, stop=stop, batch_size=size)
        assert facts(got) == facts(run(target, sampler=greedy, stop=stop))
    assert facts(run(target, max_new_tokens=1, batch_size=3)) == facts(run(target, max_new_tokens=1))


def test_first_tokens_come_later_in_rows_that_wait(target):
    ticks = iter(range(10**6))
    outputs = run(target, batch_size=2, clock=lambda: float(next(ticks)))
    waits = [output.ttft for output in outputs]
    assert waits == sorted(waits)
    assert len(set(waits)) > 4
    options = {"max_new_tokens": 8, "sampler": Sampler(1.0), "batch_size": 3}
    times = generate(target, None, PROMPTS, clock=lambda: float(next(ticks)), **options).times
    assert times.prefill > 0
    assert times.draft == 0 or times.total > times.draft


def test_rows_of_a_state_are_selected_and_appended():
    class Odd:
        pass

    rows = RowInts([2, 0])
    for state in (torch.arange(3), np.arange(3), RowInts([0, 1, 2]), [0, 1, 2]):
        one, other = select_rows(copy(state), rows), select_rows(copy(state), rows)
        assert list(append_rows(one, other)) == [2, 0, 2, 0]
    assert [select_rows(state, rows) for state in (None, True, [])] == [None, True, []]
    with pytest.raises(TypeError, match="Odd has no rows"):
        select_rows(Odd(), RowInts([0]))
    for one, other in ((Odd(), Odd()), (None, torch.arange(2))):
        with pytest.raises(TypeError, match="no rows"):
            append_rows(one, other)


NAMED = {"requests": [f"id-{row}" for row in range(len(PROMPTS))], "stop": ()}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize(
    "more", [NAMED, {}, {"stop": (), "until": AfterThree}], ids=["named", "stop", "until"]
)
def test_own_cache_gives_the_text_and_rounds_of_the_loop(sampler, more, target, monkeypatch):
    """All at once, and one batch after the other."""
    want = run(target, sampler=sampler, **more)
    monkeypatch.setattr(target, "abilities", Abilities(decode="it goes forward", own_cache=True))
    for size in (None, 4):
        found = run(target, sampler=sampler, batch_size=size, **more)
        assert facts(found) == facts(want)
        assert all(output.ttft > 0 for output in found)
