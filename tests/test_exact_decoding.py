"""The production loop is lossless: every outcome of every coin is played, nothing is sampled.

The loop runs for real (row cache, tree masks, compaction, ragged batch, rows that leave) on a
random fp64 model; its exact law of a row's first tokens must be that of full forwards.
"""

from __future__ import annotations

import pytest
import torch
from exact import (
    EnumeratingCoin,
    FixedChains,
    FixedTrees,
    SampledChains,
    Script,
    Scripted,
    assert_same_law,
    exact_law,
    target_law,
)

from decode.draft import PAD
from decode.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler

PROMPTS = [[1, 2, 0, 1], [2], [0, 0, 2]]
CHAIN = Plan(depth=2)
TREE = Plan(depth=2, width=2, nodes=5)
DEEP = Plan(depth=3, width=2, nodes=9)
SAMPLED = Plan(depth=2, proposal="sampled")
PAIR = Plan(depth=1, proposal="sampled")
WARPERS = {
    "top_p": Sampler(0.5, top_p=0.9),
    "top_k": Sampler(0.5, top_k=2),
    "min_p": Sampler(0.5, min_p=0.2),
    "penalty": Sampler(0.5, repetition_penalty=1.7),
    "all": Sampler(0.8, top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=0.7),
}


def check_lossless(target, drafter, plan, sampler, length=3, stop=(), prompts=PROMPTS, abreast=48, rows=None):
    """Each row in turn branches on all its decisions, its neighbours following scripts.

    The row below a draft of depth K first matters for token K + 2: the prefill gives the first.
    """
    for row in range(len(prompts)) if rows is None else rows:

        def play(tapes, row=row):
            coins = [Script(r) for r in range(len(prompts))]
            coins[row] = tapes[0]
            batch = [*prompts, *[prompts[row]] * (len(tapes) - 1)]  # further plays ride along
            coin = EnumeratingCoin([*coins, *tapes[1:]])
            run = generate(
                target,
                drafter,
                batch,
                max_new_tokens=length,
                sampler=sampler,
                plan=plan,
                stop=stop,
                coin=coin,
            )
            texts = [tuple(o.tokens) for o in run.outputs]
            return [texts[row], *texts[len(prompts) :]]

        want = target_law(target.model, prompts[row], length, sampler, stop)
        assert_same_law(exact_law(play, abreast), want)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_match_on_chains_is_lossless(tiny_target, temperature):
    check_lossless(tiny_target(), FixedChains(3), CHAIN, Sampler(temperature), length=4)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_match_on_trees_is_lossless(tiny_target, temperature, seed):
    check_lossless(tiny_target(), FixedTrees(3, seed), TREE, Sampler(temperature), length=4)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_token_on_sampled_chains_is_lossless(tiny_target, temperature):
    check_lossless(tiny_target(), SampledChains(3), SAMPLED, Sampler(temperature))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_token_is_lossless_past_a_chain_accepted_whole(tiny_target, temperature):
    prompts = [[1, 0, 0, 1], [1], [0, 0]]
    for seed in range(2):
        drafter = SampledChains(2, seed)
        check_lossless(
            tiny_target(vocab=2), drafter, SAMPLED, Sampler(temperature), length=4, prompts=prompts
        )


def test_token_is_lossless_over_three_rounds(tiny_target):
    check_lossless(tiny_target(), SampledChains(3), PAIR, Sampler(0.5), length=4, abreast=128, rows=[0])


@pytest.mark.parametrize("warper", WARPERS)
def test_match_is_lossless_under_every_warper(tiny_target, warper):
    check_lossless(tiny_target(), FixedTrees(3), TREE, WARPERS[warper])


@pytest.mark.parametrize("warper", WARPERS)
def test_token_is_lossless_under_every_warper(tiny_target, warper):
    check_lossless(tiny_target(), SampledChains(3), SAMPLED, WARPERS[warper])


def test_greedy_heeds_the_repetition_penalty(tiny_target):
    sampler = Sampler(0.0, repetition_penalty=2.5)
    check_lossless(tiny_target(vocab=5), FixedTrees(5), TREE, sampler, length=4)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_match_with_a_drafter_is_lossless(tiny_target, make_drafter, drafter_name, plan, temperature):
    target = tiny_target()
    check_lossless(target, make_drafter(drafter_name, target), plan, Sampler(temperature))


@pytest.mark.parametrize("sampler", [Sampler(0.5), Sampler(1.0), WARPERS["all"]], ids=["0.5", "1", "all"])
def test_token_with_a_drafter_is_lossless(tiny_target, make_drafter, drafter_name, sampler):
    target = tiny_target()
    check_lossless(target, make_drafter(drafter_name, target), SAMPLED, sampler)


@pytest.mark.parametrize(
    ("drafter", "plan"), [(FixedTrees(3), TREE), (SampledChains(3), SAMPLED)], ids=["match", "token"]
)
def test_rows_that_stop_on_their_own_leave_the_others_exact(tiny_target, drafter, plan):
    check_lossless(tiny_target(), drafter, plan, Sampler(1.0), stop=[2])


def test_a_row_is_exact_in_a_batch_of_three_replayed_one_by_one(tiny_target):
    """As above without further plays riding along: the batch shrinks to the branching row alone."""
    check_lossless(tiny_target(seed=1), FixedTrees(3, 3), TREE, Sampler(1.0), abreast=1)


def test_trees_of_three_levels_are_exact(tiny_target):
    check_lossless(tiny_target(), FixedTrees(3, 2), DEEP, Sampler(1.0), length=5, rows=[0, 1])


@pytest.mark.parametrize("window", [2, 4])
def test_a_sliding_window_is_exact(tiny_target, window):
    """Shorter than a path, so that it ends inside the tree, and longer."""
    target = tiny_target(window=window)
    check_lossless(target, FixedTrees(3, 2), DEEP, Sampler(1.0), length=5, rows=[0])


def test_drafts_past_the_end_of_the_context_change_nothing(tiny_target):
    target = tiny_target(positions=6)
    prompts = [[1, 2, 0, 1], [2, 0, 1, 0], [1, 1, 1, 2]]
    for text in prompts:
        run = generate(target, FixedTrees(3), [text], max_new_tokens=9, sampler=Sampler(1.0), plan=TREE)
        assert len(run.outputs[0].tokens) == 2
    check_lossless(target, FixedTrees(3), TREE, Sampler(1.0), length=2, prompts=prompts)


@pytest.mark.parametrize(
    ("drafter", "plan"), [(FixedTrees(4), TREE), (SampledChains(4), SAMPLED)], ids=["match", "token"]
)
def test_what_inactive_rows_are_told_never_matters(tiny_target, drafter, plan):
    target = tiny_target(vocab=4)
    for seed in range(4):
        runs = []
        for junk in range(4):  # as a token, and as a coin that is heads for all but 0
            coin = EnumeratingCoin([Script(10 * seed + r) for r in range(3)], junk)
            run = generate(
                target,
                drafter,
                PROMPTS,
                max_new_tokens=12,
                sampler=Sampler(1.0, repetition_penalty=1.2),
                plan=plan,
                coin=coin,
            )
            runs.append([(o.tokens, o.emitted, o.accepted) for o in run.outputs])
        assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("sampler", [Sampler(1.0), WARPERS["all"]], ids=["1", "all"])
def test_match_reproduces_plain_sampling_token_for_token(tiny_target, sampler):
    target = tiny_target(vocab=5)
    prompts = [[1, 2, 0, 1], [2], [0, 4, 2], [3, 3]]
    options = {"max_new_tokens": 24, "sampler": sampler, "seed": 5, "stop": [4]}
    plain = [o.tokens for o in generate(target, None, prompts, **options).outputs]
    for seed in range(3):
        run = generate(target, FixedTrees(5, seed), prompts, plan=TREE, **options)
        assert [o.tokens for o in run.outputs] == plain
        assert any(sum(o.accepted) for o in run.outputs)


class Recorder(FixedTrees):
    """Compares what it is told with a pass that has no cache."""

    def new_state(self, rows):
        self.joined = []
        return super().new_state(rows)

    def advance(self, state, target, tokens, taps, counts, root):
        before = [max(len(text) - 1, 0) for text in state]
        super().advance(state, target, tokens, taps, counts, root)
        assert tokens.shape == taps.shape[:2]
        for row, text in enumerate(state):
            want = target.read(torch.tensor([text])).taps[0, before[row] : -1]
            torch.testing.assert_close(taps[row, : counts[row]], want, rtol=0, atol=1e-12)
        self.joined.append([list(text) for text in state])


@pytest.mark.parametrize(("seed", "stop"), [(0, []), (1, []), (2, [3])])
def test_a_drafter_is_told_the_settled_tokens_and_their_own_taps(tiny_target, seed, stop):
    target = tiny_target(vocab=4)
    target.tap([0, 1, "last"])
    drafter = Recorder(4, seed)
    prompts = PROMPTS * 3
    run = generate(
        target, drafter, prompts, max_new_tokens=10, sampler=Sampler(1.0), plan=TREE, stop=stop, seed=seed
    )
    finished = [[*p, *o.tokens] for p, o in zip(prompts, run.outputs, strict=True)]
    for texts in drafter.joined:
        assert all(any(full[: len(t)] == t for full in finished) for t in texts)
    assert len(drafter.joined) > 3


@pytest.mark.parametrize("stop", [[2], [0, 3]])
def test_nothing_follows_an_end_token_and_counts_are_cut_there(tiny_target, stop):
    target = tiny_target(vocab=4)
    for seed in range(6):
        run = generate(
            target,
            FixedTrees(4, seed),
            PROMPTS,
            max_new_tokens=9,
            sampler=Sampler(1.0),
            plan=TREE,
            stop=stop,
            seed=seed,
        )
        for output in run.outputs:
            assert not set(output.tokens[:-1]) & set(stop)
            assert output.stopped == (output.tokens[-1] in stop)
            assert output.stopped or len(output.tokens) == 9
            assert 1 + sum(output.emitted) == len(output.tokens)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_no_more_tokens_are_emitted_than_were_asked_for(tiny_target, length):
    run = generate(
        tiny_target(), FixedTrees(3), PROMPTS, max_new_tokens=length, sampler=Sampler(1.0), plan=TREE
    )
    assert [len(o.tokens) for o in run.outputs] == [length] * 3


class Witness:
    """Compares the row of every slot of every round with a pass that has no cache."""

    def __init__(self, target, prompts) -> None:
        self.target, self.texts = target, [list(p) for p in prompts]
        self.slots = 0

    def __call__(self, seen) -> None:
        for row, request in enumerate(seen.requests):
            text, paths = self.texts[request], [()]
            for token, parent in zip(
                seen.draft.tokens[row].tolist(), seen.draft.parents[row].tolist(), strict=True
            ):
                paths.append((*paths[parent + 1], token))
            for logits, path in zip(seen.logits[row], paths, strict=True):
                if PAD not in path:
                    ids = torch.tensor([[*text, *path]])
                    want = self.target.model(input_ids=ids, use_cache=False).logits[0, -1]
                    torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
                    self.slots += 1
            text += seen.emitted[row]


@pytest.mark.parametrize("window", [None, 2, 3])
def test_every_slots_row_is_that_of_a_plain_pass_over_its_path(tiny_target, window):
    target = tiny_target(vocab=4, window=window)
    prompts = [*PROMPTS, [3, 3], [0, 1], [2, 2, 1, 1, 0]]
    witness = Witness(target, prompts)
    options = {"max_new_tokens": 12, "sampler": Sampler(1.0), "plan": DEEP, "stop": [3], "seed": 1}
    generate(target, FixedTrees(4), prompts, on_round=witness, **options)
    assert witness.slots > 50


def test_plain_decoding_is_exact(tiny_target):
    check_lossless(tiny_target(), None, Plan(), Sampler(0.5), length=4)


def test_a_plan_of_depth_zero_drafts_nothing(tiny_target):
    check_lossless(tiny_target(), Scripted(3), Plan(), Sampler(1.0))
