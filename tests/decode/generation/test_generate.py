"""The loop at its edges: no prompts, the end of the context, memory, interrupted runs."""

import pytest
import torch
from scripted import Oracle, Watch, greedy

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Traits
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

VOCAB, POSITIONS, LENGTH = 23, 48, 20
PROMPTS = [[5, 9, 2, 7, 3], [4], [17, 4, 21, 6, 12, 2, 8, 8]]
CHAIN, TREE = Plan(depth=6), Plan(depth=6, width=3, nodes=12)
SHAPES = pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
GREEDY = Sampler(0.0)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return tiny_target(vocab=VOCAB, hidden=16, positions=POSITIONS)


@pytest.fixture(scope="module")
def answers(target):
    return [greedy(target.model, prompt, LENGTH) for prompt in PROMPTS]


def texts(answers, prompts=PROMPTS):
    return [p + a for p, a in zip(prompts, answers, strict=True)]


def run(target, drafter, prompts=PROMPTS, plan=CHAIN, sampler=GREEDY, **options):
    options = {"max_new_tokens": LENGTH} | options
    return generate(target, drafter, prompts, sampler=sampler, plan=plan, **options).outputs


def oracle(answers, plan, right=1.0, prompts=PROMPTS):
    return Oracle(texts(answers, prompts), VOCAB, right=right, branches=4 if plan is TREE else 0)


def tokens(outputs):
    return [output.tokens for output in outputs]


class Fixed:
    """Always proposes the same chain."""

    traits = Traits()

    def __init__(self, chain):
        self.chain, self.calls = chain, 0

    def new_state(self, rows):
        return [rows]

    def advance(self, state, target, tokens, taps, counts, root):
        assert len(counts) == len(root) == len(tokens) == state[0]

    def select(self, state, rows):
        state[0] = len(rows)

    def propose(self, state, target, sampler, coin, plan):
        self.calls += 1
        return Draft.chain(torch.tensor([self.chain]).expand(state[0], -1))


def test_one_token_asks_no_drafter(target, answers):
    drafter, watch = Fixed([1, 2]), Watch(3)
    outputs = run(target, drafter, max_new_tokens=1, on_round=watch)
    assert tokens(outputs) == [answer[:1] for answer in answers]
    assert drafter.calls == 0
    assert len(watch.rounds) == 1


# -- prompts -------------------------------------------------------------------------------------


@SHAPES
def test_no_prompts_give_no_outputs(target, plan):
    watch = Watch(0)
    generation = generate(target, Fixed([1]), [], max_new_tokens=4, sampler=GREEDY, plan=plan, on_round=watch)
    assert generation.outputs == []
    assert watch.rounds == []
    assert generation.times.total == generation.times.prefill == 0


@pytest.mark.parametrize("length", [0, POSITIONS, POSITIONS + 1, 3 * POSITIONS])
def test_empty_prompt_and_prompt_that_fills_the_context_are_refused(target, length):
    said = f"prompt 1 has {length} tokens .* context of {POSITIONS}" if length else "prompt 1 is empty"
    with pytest.raises(UserError, match=said) as caught:
        run(target, None, [[3], [1] * length])
    assert "\n" not in str(caught.value)


@SHAPES
def test_padding_id_in_an_answer_is_a_token(target, answers, plan, monkeypatch):
    written = [token for answer in answers for token in answer]
    common = max(set(written), key=written.count)
    monkeypatch.setattr(target.model.config, "pad_token_id", common)
    assert tokens(run(target, oracle(answers, plan, 0.9), plan=plan)) == answers


@SHAPES
def test_the_context_is_filled_to_the_last_token(target, plan, monkeypatch):
    """Drafts reach past the end; no position does, and what is cut was never emitted."""
    prompts = [[3, 8, 1] * 15 + [2, 7], [3, 8, 1] * 15, [5] * 40, [5, 11]]
    assert [POSITIONS - len(p) for p in prompts] == [1, 3, 8, 46]
    mine = [greedy(target.model, p, POSITIONS - len(p)) for p in prompts]
    seen, body = [], target._body

    def spy(tokens, positions, *rest):
        seen.append(int(positions.max()))
        return body(tokens, positions, *rest)

    monkeypatch.setattr(target, "_body", spy)
    wanted = [m + [1] * 9 for m in mine]  # the drafter drafts past the end
    outputs = run(target, oracle(wanted, plan, 0.9, prompts), prompts, plan, max_new_tokens=1000)
    assert tokens(outputs) == mine
    assert max(seen) == POSITIONS - 1
    assert any(o.accepted[-1] >= o.emitted[-1] for o in outputs if o.emitted) or plan is TREE


# -- memory --------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("capacity", [1, 9])
def test_cache_grows_and_its_new_memory_is_never_read(target, answers, plan, capacity, monkeypatch):
    start, empty = Target.start, torch.Tensor.new_empty

    def empty_of_nan(self, *args, **options):
        return empty(self, *args, **options).fill_(float("nan"))

    monkeypatch.setattr(Target, "start", lambda self, rows, wanted: start(self, rows, capacity))
    monkeypatch.setattr(torch.Tensor, "new_empty", empty_of_nan)
    watch, full = Watch(3), []

    def on_round(seen):
        watch(seen)
        store = target.cache.store
        full.append(max(store.lengths) <= store.width <= store.capacity == store._data.shape[3])

    outputs = run(target, oracle(answers, plan, right=0.7), plan=plan, on_round=on_round)
    assert tokens(outputs) == answers
    assert all(seen.logits.isfinite().all() for seen in watch.rounds)
    assert all(full)
    assert target.cache.store.capacity >= LENGTH > capacity


@SHAPES
def test_one_allocation_is_enough_for_a_run(target, plan, monkeypatch):
    prompts = [[3, 8, 1] * 15, [5] * 40, [5, 11], *PROMPTS]
    sizes, start = [], Target.start

    def spy(self, rows, wanted):
        sizes.append(wanted)
        return start(self, rows, wanted)

    monkeypatch.setattr(Target, "start", spy)
    run(target, Fixed([1] * 6) if plan is CHAIN else Oracle([], VOCAB), prompts, plan)
    assert target.cache.store.capacity == sizes[0]


def test_run_keeps_nothing_of_an_earlier_or_interrupted_run(target, answers):
    class Failing(Fixed):
        def propose(self, *args):
            if self.calls == 2:
                raise InterruptedError
            return super().propose(*args)

    run(target, oracle(answers, TREE), PROMPTS * 3, TREE)  # longer, and of more rows
    assert tokens(run(target, oracle(answers, TREE), PROMPTS[1:2], TREE)) == answers[1:2]
    with pytest.raises(InterruptedError):
        run(target, Failing([1, 2]))
    assert tokens(run(target, None, plan=Plan())) == answers


# -- drafts --------------------------------------------------------------------------------------


def test_plan_of_no_drafts_is_plain_decoding(target, answers):
    drafter = Fixed([1])
    drafter.new_state = drafter.advance = None  # called nowhere
    outputs = run(target, drafter, plan=Plan())
    assert tokens(outputs) == answers
    assert drafter.calls == 0
    assert all(set(output.draft_lengths) == {0} for output in outputs)


def test_observers_see_every_token_once(target, answers):
    watch = Watch(3)
    run(target, oracle(answers, TREE, 0.6), plan=TREE, on_round=watch)
    first, *others = watch.rounds
    assert first.draft.depth == 0
    assert first.requests == [0, 1, 2]
    assert all(seen.draft.depth == TREE.depth for seen in others)
    written = [[], [], []]
    for seen in watch.rounds:
        for request, emitted in zip(seen.requests, seen.emitted, strict=True):
            written[request] += emitted
    assert written == answers


# -- randomness ----------------------------------------------------------------------------------


def test_draws_belong_to_request_and_sample(target):
    def sampled(requests, samples, seed=0):
        prompts = [PROMPTS[0]] * len(requests)
        options = {"requests": requests, "samples": samples, "seed": seed}
        return tokens(run(target, None, prompts, Plan(), Sampler(1.0), **options))

    one = sampled(["a", "a", "b", "a"], [0, 1, 0, 0])
    assert one[0] == one[3]
    assert len({tuple(row) for row in one}) == 3
    assert sampled(["b", "a"], [0, 1]) == [one[2], one[1]]
    assert sampled(["a"], [0], seed=1) != [one[0]]
    assert sampled([0, "0"], None)[0] == sampled([0, "0"], None)[1], "a name is its text"


def test_times_add_up(target, answers):
    options = {"max_new_tokens": LENGTH, "sampler": GREEDY, "plan": CHAIN}
    times = generate(target, oracle(answers, CHAIN), PROMPTS, **options).times
    assert min(times.draft, times.verify, times.other, times.prefill) > 0
    assert times.draft + times.verify + times.other == pytest.approx(times.total)
