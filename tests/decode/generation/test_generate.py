"""The loop at its edges: no prompts, the end of the context, memory, interruptions, numbers of any type."""

import numpy as np
import pytest
import torch
from scripted import Oracle, Watch, greedy

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.generation.types import Traits
from decode.lossy.reward_guided import generate_judged
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
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


# -- numbers that callers give -----------------------------------------------------------------------


TWO, ONE = [[1, 2, 3], [4, 5]], Sampler(1.0)


def decoded(target, prompts=TWO, **changes):
    options = {"max_new_tokens": 8, "sampler": ONE, "seed": 3, "requests": [0, 1], "samples": [0, 1]}
    return [o.tokens for o in generate(target, None, prompts, **options | changes).outputs]


SAME = {
    "seed": [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)],
    "samples": [np.arange(2), range(2), torch.arange(2), (np.int32(0), torch.tensor(1))],
    "requests": [np.arange(2), range(2), torch.arange(2), ["0", "1"], np.array(["0", "1"])],
    "max_new_tokens": [np.int64(8), torch.tensor(8)],
    "batch_size": [np.int64(1), torch.tensor(2), 5],
    "prompts": [
        [np.array(p) for p in TWO],
        [torch.tensor(p) for p in TWO],
        [tuple(map(np.int64, p)) for p in TWO],
        [list(torch.tensor(p)) for p in TWO],
    ],
}


@pytest.mark.parametrize("name", SAME)
def test_number_of_another_type_gives_the_same_text(target, name):
    expected = decoded(target)
    for value in SAME[name]:
        assert decoded(target, **{name: value}) == expected, value


def test_end_tokens_of_a_tensor_end_a_text(target):
    end = decoded(target)[0][2]
    expected = decoded(target, stop=[end])
    assert len(expected[0]) <= 3
    for stop in (torch.tensor([end]), np.array([end]), [torch.tensor(end)], (np.int16(end),)):
        assert decoded(target, stop=stop) == expected
        options = {"max_new_tokens": 8, "sampler": ONE, "seed": 3, "stop": stop}
        pieces = stream(target, None, TWO[0], **options)
        assert [token for piece in pieces for token in piece.tokens] == expected[0]
        judged = generate_judged(*judge(target), **options)
        assert judged.outputs[0].stopped


def judge(target):
    """Arguments of `generate_judged`, which likes every step and ends none."""
    return target, target, TWO[:1], lambda *_: 1.0, 0.5, lambda: lambda _: False


BAD = {
    "seed": [3.0, True, np.True_, None, "3", np.float64(3), torch.tensor(3.0)],
    "samples": [[0.0, 1.0], [0]],
    "requests": [[0.5, 1], [0]],
    "max_new_tokens": [0, -1, 2.5, float("nan"), None],
    "batch_size": [0, -2, 1.5],
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_number_is_named_in_one_line(target, name):
    for value in BAD[name]:
        with pytest.raises(UserError, match=f"^{name}") as error:
            decoded(target, **{name: value})
        assert "\n" not in str(error.value)
        assert "context" not in str(error.value)
        options = {"max_new_tokens": 4, "sampler": ONE, name: value}
        if name in ("seed", "max_new_tokens"):
            with pytest.raises(UserError, match=f"^{name}="):
                stream(target, None, [1], **options)
            with pytest.raises(UserError, match=f"^{name}="):
                generate_judged(*judge(target), **options)
        if name in ("batch_size", "max_new_tokens"):  # also where there are no prompts
            with pytest.raises(UserError, match=f"^{name}="):
                generate(target, None, [], **options)


@pytest.mark.parametrize("wrong", [-1, VOCAB, VOCAB + 100])
def test_token_that_the_target_does_not_have_is_named(target, wrong):
    with pytest.raises(
        UserError, match=rf"prompt 1 has token {wrong}; the target has tokens 0 to {VOCAB - 1}"
    ):
        decoded(target, prompts=[[1], [2, wrong]])


def test_lookup_drafter_finds_the_tokens_of_a_tensor(target, make_drafter):
    """A drafter keeps the text in dicts, where a tensor is equal to nothing."""
    drafter, prompt = make_drafter("suffix", target), [1, 2, 3, 1, 2, 3, 1, 2]
    options = {"max_new_tokens": 8, "sampler": Sampler(0.0), "plan": Plan(3)}
    (expected,) = generate(target, drafter, [prompt], **options).outputs
    (found,) = generate(target, drafter, [list(torch.tensor(prompt))], **options).outputs
    assert (found.tokens, found.drafted) == (expected.tokens, expected.drafted)
    assert sum(found.drafted)


def test_draws_are_the_same_in_every_version():
    key = Key(Purpose.TARGET, 0)
    drawn = [float(KeyedCoin(s, r, n).uniform(key)[0]) for s, r, n in [(0, [0], None), (7, ["a"], [2])]]
    assert drawn == [0.21681354706614353, 0.061978448130017516]


@pytest.mark.parametrize(
    "ids", [[5.7, 3], ["5"], [True, 5], np.array([1.0]), torch.tensor([1.0]), [None]], ids=str
)
def test_ids_that_are_no_integers_are_refused(target, ids):
    with pytest.raises(UserError, match="token ids: give a list of integers"):
        decoded(target, prompts=[ids])
