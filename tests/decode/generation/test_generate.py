"""The loop at its edges: where texts end, where the context ends, where memory ends."""

import pytest
import torch
from scripted import Oracle, Watch, greedy

from decode.draft import PAD, Draft
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
    outputs = generate(target, drafter, prompts, sampler=sampler, plan=plan, **options).outputs
    for output in outputs:
        consistent(output)
    return outputs


def consistent(output):
    assert len(output.emitted) == len(output.accepted) == len(output.draft_lengths) == len(output.drafted)
    assert 1 + sum(output.emitted) == len(output.tokens)
    rounds = list(zip(output.emitted, output.accepted, output.draft_lengths, output.drafted, strict=True))
    for number, (emitted, accepted, offered, drafted) in enumerate(rounds):
        last = number == len(rounds) - 1
        assert emitted == accepted + 1 or (last and 1 <= emitted <= accepted)
        assert accepted <= offered <= drafted


def oracle(answers, plan, right=1.0, prompts=PROMPTS):
    return Oracle(texts(answers, prompts), VOCAB, right=right, branches=4 if plan is TREE else 0)


def tokens(outputs):
    return [output.tokens for output in outputs]


# -- where texts end -----------------------------------------------------------------------------


@SHAPES
def test_an_end_token_inside_a_draft_ends_the_text(target, answers, plan):
    """Each end in turn: drafts go on behind it, and what they hold there is not emitted."""
    inside = 0
    for stop in sorted({token for answer in answers for token in answer}):
        for output, answer in zip(
            run(target, oracle(answers, plan), plan=plan, stop=[stop]), answers, strict=True
        ):
            end = answer.index(stop) if stop in answer else LENGTH - 1
            assert output.tokens == answer[: end + 1]
            assert output.stopped == (stop in answer)
            cut = bool(output.emitted) and output.emitted[-1] <= output.accepted[-1]
            inside += cut and output.stopped
    assert inside >= 3, "ends fell inside drafts"


def test_a_rejected_end_token_ends_nothing(target, answers):
    stop = next(t for t in range(VOCAB) if not any(t in answer for answer in answers))
    outputs = run(target, Fixed([stop, stop]), stop=[stop])
    assert tokens(outputs) == answers
    assert not any(output.stopped for output in outputs)
    assert all(accepted == 0 for output in outputs for accepted in output.accepted)


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


@SHAPES
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_fewer_tokens_than_a_draft_holds(target, answers, plan, length):
    outputs = run(target, oracle(answers, plan), plan=plan, max_new_tokens=length)
    assert tokens(outputs) == [answer[:length] for answer in answers]
    assert not any(output.stopped for output in outputs)
    assert all(len(output.emitted) == (length > 1) for output in outputs), "one round at most"


def test_one_token_asks_no_drafter(target, answers):
    drafter, watch = Fixed([1, 2]), Watch(3)
    outputs = run(target, drafter, max_new_tokens=1, on_round=watch)
    assert tokens(outputs) == [answer[:1] for answer in answers]
    assert drafter.calls == 0
    assert len(watch.rounds) == 1


@pytest.mark.parametrize("length", [0, -3])
def test_no_tokens_at_all_are_refused(target, length):
    with pytest.raises(UserError, match=f"max_new_tokens={length}: give an integer of at least 1"):
        run(target, None, max_new_tokens=length)


@SHAPES
def test_all_rows_end_at_once(target, answers, plan):
    watch = Watch(4)
    prompts = [PROMPTS[0]] * 4
    drafter = oracle(answers[:1], plan, prompts=PROMPTS[:1])
    stop = [answers[0][6]]
    outputs = run(target, drafter, prompts, plan, stop=stop, on_round=watch)
    assert tokens(outputs) == [answers[0][: answers[0].index(stop[0]) + 1]] * 4
    assert {len(seen.requests) for seen in watch.rounds} == {4}


@SHAPES
def test_rows_end_one_after_another(target, answers, plan):
    """Each of them leaves; the rest go on with their own state, cache, draws and limits."""
    longest = [p + [1] * (POSITIONS - 4 - 3 * i - len(p)) for i, p in enumerate(PROMPTS)]
    mine = [greedy(target.model, p, POSITIONS - len(p)) for p in longest]
    watch = Watch(3)
    outputs = run(target, oracle(mine, plan, right=0.5, prompts=longest), longest, plan, on_round=watch)
    assert tokens(outputs) == mine
    assert [len(output.tokens) for output in outputs] == [4, 7, 10]
    assert sorted({len(seen.requests) for seen in watch.rounds}) == [1, 2, 3]


# -- prompts -------------------------------------------------------------------------------------


@SHAPES
def test_no_prompts(target, plan):
    watch = Watch(0)
    generation = generate(target, Fixed([1]), [], max_new_tokens=4, sampler=GREEDY, plan=plan, on_round=watch)
    assert generation.outputs == []
    assert watch.rounds == []
    assert generation.times.total == generation.times.prefill == 0


def test_an_empty_prompt_is_refused_by_number(target):
    with pytest.raises(UserError, match="prompt 1 is empty"):
        run(target, None, [[3], [], [4]])


def test_a_prompt_of_one_token(target, answers):
    for plan in (CHAIN, TREE):
        output = run(target, oracle(answers, plan), [PROMPTS[1]], plan)[0]
        assert output.tokens == answers[1]
    assert sum(output.accepted) > 10


@pytest.mark.parametrize("length", [POSITIONS, POSITIONS + 1, 3 * POSITIONS])
def test_a_prompt_that_fills_the_context_is_refused(target, length):
    with pytest.raises(UserError, match=f"prompt 1 has {length} tokens .* context of {POSITIONS}") as caught:
        run(target, None, [[3], [1] * length])
    assert "\n" not in str(caught.value)


@SHAPES
def test_a_padding_id_in_an_answer_is_a_token_like_any_other(target, answers, plan, monkeypatch):
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
    seen = []
    body = target._body
    monkeypatch.setattr(
        target,
        "_body",
        lambda tokens, positions, *i: seen.append(int(positions.max())) or body(tokens, positions, *i),
    )
    wanted = [m + [1] * 9 for m in mine]  # the drafter would go on
    outputs = run(target, oracle(wanted, plan, 0.9, prompts), prompts, plan, max_new_tokens=1000)
    assert tokens(outputs) == mine
    assert max(seen) == POSITIONS - 1
    assert any(o.accepted[-1] >= o.emitted[-1] for o in outputs if o.emitted) or plan is TREE


# -- memory --------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("capacity", [1, 3, 9])
def test_the_cache_grows(target, answers, plan, capacity, monkeypatch):
    """A row never runs out of room, and what new memory holds is never read."""
    start, empty = Target.start, torch.Tensor.new_empty
    monkeypatch.setattr(Target, "start", lambda self, rows, wanted: start(self, rows, capacity))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: empty(self, *a, **k).fill_(float("nan"))
    )
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
def test_what_is_allocated_is_enough(target, answers, plan, monkeypatch):
    """The usual case: one allocation for the whole run."""
    prompts = [[3, 8, 1] * 15, [5] * 40, [5, 11], *PROMPTS]
    sizes = []
    start = Target.start
    monkeypatch.setattr(
        Target, "start", lambda self, rows, wanted: (sizes.append(wanted), start(self, rows, wanted))
    )
    run(target, Fixed([1] * 6) if plan is CHAIN else Oracle([], VOCAB), prompts, plan)
    assert target.cache.store.capacity == sizes[0]


def test_a_run_begins_afresh(target, answers):
    """Nothing of an earlier run, longer and of more rows, is left."""
    run(target, oracle(answers, TREE), PROMPTS * 3, TREE)
    assert tokens(run(target, oracle(answers, TREE), PROMPTS[1:2], TREE)) == answers[1:2]


def test_an_interrupted_run_leaves_nothing(target, answers):
    class StopHere(Exception):  # noqa: N818
        pass

    class Failing(Fixed):
        def propose(self, *args):
            if self.calls == 2:
                raise StopHere
            return super().propose(*args)

    with pytest.raises(StopHere):
        run(target, Failing([1, 2]))
    assert tokens(run(target, None, plan=Plan())) == answers


# -- drafts --------------------------------------------------------------------------------------


def test_a_drafter_with_nothing_to_draft_is_plain_decoding(target, answers):
    drafter = Fixed([1])
    drafter.new_state = drafter.advance = None  # called nowhere
    outputs = run(target, drafter, plan=Plan())
    assert tokens(outputs) == answers
    assert drafter.calls == 0
    assert all(set(output.draft_lengths) == {0} for output in outputs)


@pytest.mark.parametrize("rule", ["match", "token"])
def test_rows_may_be_offered_less_or_nothing(target, answers, rule):
    """Padding is no node: neither accepted nor counted."""

    class Uneven(Oracle):
        def propose(self, state, *args):
            draft = super().propose(state, *args)
            for row in range(len(state)):
                draft.tokens[row, len(state[row]) % 4 :] = PAD
            if rule == "match":
                return draft
            laws = torch.nn.functional.one_hot(draft.tokens.clamp_min(0), VOCAB).double()
            return Draft.chain(draft.tokens, laws)

    plan = Plan(depth=6, proposal="fixed" if rule == "match" else "sampled", rule=rule)
    outputs = run(target, Uneven(texts(answers), VOCAB, right=0.9, branches=0), plan=plan)
    assert tokens(outputs) == answers
    assert {0, 1, 2, 3} == {offered for output in outputs for offered in output.draft_lengths}
    assert [o.drafted for o in outputs] == [o.draft_lengths for o in outputs]
    assert sum(sum(output.accepted) for output in outputs) > 5


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
    times = generate(
        target, oracle(answers, CHAIN), PROMPTS, max_new_tokens=LENGTH, sampler=GREEDY, plan=CHAIN
    ).times
    assert times.draft > 0
    assert times.verify > 0
    assert times.other > 0
    assert times.prefill > 0
    assert times.draft + times.verify + times.other == pytest.approx(times.total)
