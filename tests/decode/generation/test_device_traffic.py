"""A steady round waits for the device once: one upload, one read, no synchronisation."""

from collections import Counter

import pytest
import torch
from device_traffic import CUDA, READ, SYNCHRONISATION, UPLOAD, Traffic

from benchmarks.gpu.device import Operations
from decode.depth_policy import DepthPolicy
from decode.generation.capture.makers import Captures, traced
from decode.generation.loop import Loop
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts, Settled
from drafters.models.union import Union
from drafters.zoo.cascade import Cascade

VOCAB = 24
PROMPTS = [[5, 9, 2, 7, 3, 5, 9, 2], [4, 6, 10], [17, 4, 21, 6, 12, 17, 4]]
LEARNING, STEADY = 2, 4  # rounds; the first find out which random numbers a round draws
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
PACE = DepthPolicy(prior=0.5, costs=((1, (1.0, 1.1, 1.2, 1.3)),))
PLANS = {
    "chain": Plan(3),
    "tree": Plan(3, 3, 7),
    "sampled chain": Plan(3, proposal="sampled"),
    "block": Plan(3, proposal="sampled", rule="block"),
    "adaptive chain": Plan(3, proposal="sampled", adapt=PACE),
    "hybrid tree": Plan(3, 3, 7, "hybrid"),
    "static tree": Plan(tree=TREE, proposal="hybrid"),
    "sampled tree": Plan(tree=TREE, proposal="sampled"),
    "traversal": Plan(tree=TREE, proposal="sampled", rule="traversal"),
    "side by side": Plan(3, proposal="sampled", drafts=3),
    "selected": Plan(3, proposal="sampled", drafts=3, rule="select"),
}


def loop_of(target, drafter, plan, temperature, limits=(60, 60, 60), **options) -> Loop:
    coin, prompts = KeyedCoin(1, range(len(limits))), PROMPTS[: len(limits)]
    return Loop(target, drafter, prompts, limits, Sampler(temperature), plan, coin, (), None, **options)


def rounds_of(target, drafter, plan, temperature, **options) -> list[dict[str, int]]:
    """Traffic of the first steady rounds of a ragged batch, none of whose rows ends, with its call sites."""
    with Traffic() as traffic:
        loop = loop_of(target, drafter, plan, temperature, **options)
        loop.admit()
        found = []
        for _ in range(LEARNING + STEADY):
            traffic.take()
            loop.round()
            found.append(traffic.take())
    assert len(loop.batch.request) == len(PROMPTS)
    assert len(set(loop.target.lengths)) > 1
    return [totals(sites) | {"sites": sites} for sites in found[LEARNING:]]


def totals(sites: Counter) -> dict[str, int]:
    kinds = {UPLOAD: 0, READ: 0, SYNCHRONISATION: 0}
    for (kind, _), number in sites.items():
        kinds[kind] += number
    return kinds


def assert_waits_once(target, drafter, plan, temperature):
    # A union reads its first drafter's probabilities, which it mixes; what the first reads late may have
    # gaps, whose places are uploaded, and so is the mixture's draft.
    more = int(isinstance(drafter, Union))
    if isinstance(drafter, Cascade):  # reads what is expanded, to look at it in the text, and uploads guesses
        more = plan.depth
    for kinds in rounds_of(target, drafter, plan, temperature):
        assert kinds[UPLOAD] <= 1 + 2 * more, kinds
        assert 1 <= kinds[READ] <= 1 + more, kinds
        assert not kinds[SYNCHRONISATION], kinds


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=VOCAB, layers=3, hidden=16, positions=512)


@pytest.mark.parametrize("plan", ["chain", "tree"])
@pytest.mark.states
def test_round_of_every_drafter_waits_for_the_device_once(target, make_drafter, drafter_name, plan):
    drafter = make_drafter(drafter_name, target)
    for temperature in (0.0, 1.0):
        assert_waits_once(drafter.verifier(target), drafter, PLANS[plan], temperature)


def test_round_behind_kept_text_waits_for_the_device_once(target, make_drafter):
    drafter = make_drafter("hf_dllm", target, prefix="causal", shift=1)
    assert_waits_once(target, drafter, PLANS["tree"], 1.0)


@pytest.mark.parametrize("plan", list(PLANS)[2:])
def test_round_of_every_plan_waits_for_the_device_once(target, make_drafter, plan):
    for name in ("eagle", "medusa", "cascade"):
        drafter = make_drafter(name, target)
        assert_waits_once(target, drafter, PLANS[plan], 1.0)


def test_plain_decoding_and_a_window_wait_for_the_device_once(tiny_target, make_drafter):
    windowed = tiny_target(vocab=VOCAB, layers=3, hidden=16, positions=512, window=6)
    for temperature in (0.0, 1.0):
        assert_waits_once(windowed, None, Plan(), temperature)
        assert_waits_once(windowed, make_drafter("eagle", windowed), PLANS["tree"], temperature)


# Those that the GPU queue times.
COUNTED = {"plain": Plan(), "chain of 3": Plan(3), "tree of 16": Plan(4, 4, 16)}


def captured_loop(target, drafter, plan, temperature, **options) -> Loop:
    """A loop whose next rounds repeat a trace."""
    target.capture, target.captures = True, Captures(traced)
    loop = loop_of(target, drafter, plan, temperature, **options)
    loop.admit()
    for _ in range(LEARNING):
        loop.round()
    assert target.captures._rounds
    return loop


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", COUNTED)
@pytest.mark.ci("plain-1.0", "chain of 3-1.0", "tree of 16-0.0")
def test_captured_round_reads_one_table_and_uploads_its_draws(target, make_drafter, plan, temperature):
    drafter = make_drafter("eagle", target) if COUNTED[plan].depth else None
    loop, found = captured_loop(target, drafter, COUNTED[plan], temperature), []
    with Traffic() as traffic:
        for _ in range(STEADY):
            loop.round()
            found.append(totals(traffic.take()))
    draws = int(temperature > 0)
    assert found == [{UPLOAD: draws, READ: 1, SYNCHRONISATION: 0}] * STEADY


# Operations that a captured round of one row has more: with three layers, and for each further one. They make
# masks by the row's length, keep all slots of a draft, and move a tree's keys and values layer by layer.
MORE = {"plain": (22, 1), "chain of 3": (55, 0), "tree of 16": (65, 4)}


@pytest.mark.parametrize("plan", COUNTED)
@pytest.mark.ci("tree of 16")
def test_captured_round_has_few_operations_more(tiny_target, make_drafter, plan):
    more = []
    for layers in (3, 4):
        target = tiny_target(vocab=VOCAB, layers=layers, hidden=16, positions=512, dtype=torch.float32)
        drafter = make_drafter("eagle", target) if COUNTED[plan].depth else None
        loop = loop_of(target, drafter, COUNTED[plan], 0.0, [60])
        loop.admit()
        before = operations(loop)
        after = operations(captured_loop(target, drafter, COUNTED[plan], 0.0, limits=[60]))
        assert set(after) == {after[0]}, "every round repeats the same operations"
        more.append(after[0] - min(before))  # with fewer slots to keep
    most, a_layer = MORE[plan]
    assert more[0] <= most
    assert more[1] - more[0] <= a_layer


def operations(loop: Loop) -> list[int]:
    """Of the next rounds."""
    found = []
    for _ in range(STEADY):
        with Operations() as counted:
            loop.round()
        found.append(counted.count)
    return found


def test_round_in_which_a_row_ends_uploads_the_rows_that_stay(target, make_drafter):
    drafter = make_drafter("eagle", target)
    with Traffic() as traffic:
        loop = loop_of(target, drafter, PLANS["hybrid tree"], 1.0, [12, 40, 20])
        found = [(len(loop.batch.request), totals(traffic.take())) for _ in loop.rounds()][LEARNING + 1 :]
    assert {rows for rows, _ in found} >= {0, 1, 2}
    for _, kinds in found:
        assert kinds[UPLOAD] <= 2
        assert kinds[READ] == 1


def test_device_is_synchronised_where_a_clock_was_asked_for(target, make_drafter):
    clock = iter(range(99)).__next__
    rounds = rounds_of(target, make_drafter("eagle", target), PLANS["chain"], 0.0, clock=clock)
    assert all(kinds[SYNCHRONISATION] >= 3 for kinds in rounds)


def test_traffic_is_counted_by_call_site(target):
    """A drafter of this test is no call site, so what it does is counted where src calls it."""
    values = torch.arange(4)
    uploads = [
        lambda: torch.tensor([1, 2], device=values.device),
        lambda: torch.tensor([1, 2]).to(values.device),
        lambda: values[[0, 1]],
    ]
    reads = [
        *(lambda: values.tolist(), lambda: bool(values[0]), lambda: list(values), lambda: values.cpu()),
        *(lambda: values[values > 1], lambda: values.masked_select(values > 1)),
        *(lambda: values.nonzero(), lambda: values.unique()),
    ]
    with Traffic() as traffic:
        counted = []
        traffic.count = counted.append  # every frame is outside src
        assert values.device.type == "cuda"
        for kind, uses in ((UPLOAD, uploads), (READ, reads)):
            for use in uses:
                use()
                assert counted == [kind]
                counted.clear()
        torch.arange(3, device=values.device).add(1)[values[:2]]
        values.cpu()
        counted.clear()
        torch.arange(4).tolist()
        assert not counted
        with pytest.raises(AssertionError, match="on the host"):
            values + torch.arange(4)


CPU = torch.device("cpu")


@pytest.mark.parametrize("known", [False, True], ids=["host only", "both"])
def test_both_copies_agree(known):
    def row_ints(*values):
        return RowInts(values, torch.tensor(values) if known else None)

    one, other = row_ints(4, 0, 7), row_ints(1, 2, 3)
    for found, expected in (
        (one.plus(other), [5, 2, 10]),
        (one.plus([1, 1, 1]), [5, 1, 8]),
        (one.plus(-1), [3, -1, 6]),
        (one.select([2, 0]), [7, 4]),
        (one.select(row_ints(1)), [0]),
        (RowInts.of(one), [4, 0, 7]),
    ):
        assert found == found.on(CPU).tolist() == expected


def test_sums_and_selections_of_known_numbers_upload_nothing():
    with Traffic() as traffic:
        counted = []
        traffic.count = counted.append
        lengths, rows = RowInts([0, 0]), RowInts([1])
        lengths.on(CUDA)
        rows.on(CUDA)
        assert counted == [UPLOAD] * 2
        accepted = torch.ones(2, dtype=torch.long, device=CUDA)
        settled = Settled([1, 1], accepted, [[5], [6]], [3, 4])
        for values in (lengths.plus(settled), settled.select(rows), lengths.select(rows).plus(1)):
            values.on(CUDA)
        assert counted == [UPLOAD] * 2


def test_settled_tokens_follow_their_rows():
    settled = Settled([1, 2, 1], None, [[5], [6, 7], [8]], [3, 4, 0]).select([2, 1])
    assert (settled, settled.texts, settled.draft_lengths) == ([1, 2], [[8], [6, 7]], [0, 4])
    assert Settled([1, 2], None, [[5], [6, 7]], ()).select([1]).draft_lengths == ()
