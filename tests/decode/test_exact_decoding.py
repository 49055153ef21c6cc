"""The loop's exact distribution of texts, by playing every outcome of every coin, is that of full forwards.

The loop runs for real (row cache, tree masks, compaction, ragged batch, rows that leave) on a random
float64 model.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from drafter_checks import able
from exact import (
    PROMPTS,
    FixedChains,
    FixedTrees,
    Grown,
    RealKeys,
    SampledChains,
    Trees,
    check_lossless,
)
from rule_cases import LOSSY, RULES

from decode.draft import PAD
from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler

CHAIN = Plan(depth=2)
TREE = Plan(depth=2, width=2, nodes=5)
DEEP = Plan(depth=3, width=2, nodes=9)
SAMPLED = Plan(depth=2, proposal="sampled")
BLOCK = Plan(depth=2, proposal="sampled", rule="block")
UNSURE = {  # some rows end at once, some after a token
    rule: replace(SAMPLED, rule=rule, min_confidence=0.55) for rule in ("token", "block", "match")
}
TWO_ONE = ((0,), (1,), (0, 0))
THREE = ((0,), (1,), (2,), (1, 0))
BUSHY = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
LOPSIDED = ((0,), (1,), (2,), (0, 0), (2, 0), (2, 1))
SIBLINGS = Plan(tree=TWO_ONE, proposal="sampled")
REPEATING = replace(SIBLINGS, replacement=True)
HYBRID = Plan(tree=BUSHY, proposal="hybrid")
SEVERAL = Plan(2, proposal="sampled", drafts=2)
DRAWN = {  # every rule on every kind of draft that is drawn, in whole or in part
    "block": BLOCK,
    "block, as traversal": replace(SAMPLED, rule="traversal"),
    "chain, matched": replace(SAMPLED, rule="match"),
    "siblings": SIBLINGS,
    "siblings, traversal": replace(SIBLINGS, rule="traversal"),
    "siblings, matched": replace(SIBLINGS, rule="match"),
    "repeating siblings": REPEATING,
    "repeating siblings, traversal": replace(REPEATING, rule="traversal"),
    "three siblings": Plan(tree=THREE, proposal="sampled"),
    "three siblings, traversal": Plan(tree=THREE, proposal="sampled", rule="traversal"),
    "hybrid": HYBRID,
    "hybrid, traversal": replace(HYBRID, rule="traversal"),
    "hybrid, matched": replace(HYBRID, rule="match"),
    "lopsided hybrid": Plan(tree=LOPSIDED, proposal="hybrid"),
    "lopsided hybrid, traversal": Plan(tree=LOPSIDED, proposal="hybrid", rule="traversal"),
    "dynamic hybrid": Plan(2, 2, 3, proposal="hybrid"),
    "wide dynamic hybrid": Plan(2, 3, 5, proposal="hybrid"),
    **{f"confident chain, {rule}": plan for rule, plan in UNSURE.items()},
    "two drafts": SEVERAL,
    "two drafts, traversal": replace(SEVERAL, rule="traversal"),
    "two drafts, matched": replace(SEVERAL, rule="match"),
    "two drafts, selected": replace(SEVERAL, rule="select"),
}


def for_every_rule(kind: str, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with each lossless rule that suits it, where DRAWN has not named it."""
    for rule in sorted(set(RULES) - set(LOSSY)):
        with suppress(UserError):
            if (changed := replace(plan, rule=rule)) not in DRAWN.values():
                yield f"{kind}, {rule}", changed


for kind, plan in {"chain": SAMPLED, "hybrid": HYBRID, "two drafts": SEVERAL}.items():
    DRAWN |= dict(for_every_rule(kind, plan))
WARPERS = {
    "top_p": Sampler(0.5, top_p=0.9),
    "top_k": Sampler(0.5, top_k=2),
    "min_p": Sampler(0.5, min_p=0.2),
    "penalty": Sampler(0.5, repetition_penalty=1.7),
    "all": Sampler(0.8, top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=0.7),
    "greedy penalty": Sampler(0.0, repetition_penalty=2.5),
}
SCRIPTED = {  # drafts of any form, that know nothing of the target
    "none": (None, Plan()),
    "nothing drafted": (FixedChains(3), Plan()),
    "chosen chain": (FixedChains(3), CHAIN),
    "chosen tree": (FixedTrees(3), TREE),
    "another chosen tree": (FixedTrees(3, 1), TREE),
    "drawn chain": (SampledChains(3), SAMPLED),
}


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drafts", SCRIPTED)
@pytest.mark.covering(pairs=True)
def test_scripted_drafts_are_lossless(tiny_target, drafts, temperature):
    length = 3 if drafts == "drawn chain" else 4
    check_lossless(tiny_target(), *SCRIPTED[drafts], Sampler(temperature), length=length)


@pytest.mark.parametrize("path", DRAWN)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.covering
def test_every_rule_is_lossless_on_drawn_drafts(tiny_target, path, temperature):
    """Grown by the production `expand` from distributions that know nothing of the target."""
    # Of three tokens, two siblings would leave one.
    vocab = 4 if "siblings" in path or DRAWN[path].width > 2 else 3
    once = vocab == 4 or "matched" in path or "drafts" in path
    drafter = Grown(vocab, 1, rounds=1 if once else math.inf)
    check_lossless(tiny_target(vocab=vocab), drafter, DRAWN[path], Sampler(temperature), rows=[0])


@pytest.mark.parametrize(
    "plan", [*UNSURE.values(), replace(CHAIN, min_confidence=0.55)], ids=lambda p: p.name
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.covering
def test_drafts_that_end_where_unsure_are_lossless(tiny_target, temperature, plan):
    lengths = set()

    class Ended(Grown):
        def propose(self, *arguments):
            draft = super().propose(*arguments)
            lengths.update((draft.tokens != PAD).sum(1).tolist())
            return draft

    drafter = Ended(3, 1, rounds=2 if plan.rule == "block" else 1)
    check_lossless(tiny_target(), drafter, plan, Sampler(temperature), length=4)
    assert lengths == {0, 1, 2}


@pytest.mark.parametrize("drafts", [2, 3])
@pytest.mark.parametrize("rule", ["match", "recursive", "kseq", "traversal", "select"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.ci(
    *["0.0-match-3", "0.5-recursive-3", "1.0-recursive-2", "1.0-traversal-3", "0.5-traversal-2"],
    *["0.5-select-3", "1.0-select-2", "0.5-kseq-3", "1.0-kseq-2"],
)
def test_drafts_side_by_side_are_lossless(tiny_target, temperature, rule, drafts):
    """Of two tokens, so that most of them are twins; drawn at one temperature whatever the target's."""
    plan = Plan(2, proposal="sampled", drafts=drafts, draft_temperature=0.8, rule=rule)
    prompts, drafter, target = [[1, 0, 0, 1], [1], [0, 0]], Grown(2, 1, rounds=1), tiny_target(vocab=2)
    check_lossless(target, drafter, plan, Sampler(temperature), length=4, prompts=prompts, abreast=256)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("rule", ["match", "recursive", "traversal"])
@pytest.mark.covering
def test_rows_with_different_trees_are_lossless(tiny_target, rule, replacement, seed):
    """Drawn and chosen nodes, holes, distributions of nothing, siblings that run out: see `Trees`."""
    drafter = Trees(3, seed, replacement=replacement)
    check_lossless(tiny_target(), drafter, Plan(2, 3, 20, rule=rule), Sampler(0.7), length=4)


def test_random_trees_have_every_form(tiny_target):
    found = set()

    class Seen(Trees):
        def propose(self, *arguments):
            draft = super().propose(*arguments)
            if draft.probs is not None:
                real, drawn, probs = draft.tokens != PAD, draft.probs.sampled, draft.probs
                forms = {
                    "hole": (~real & drawn).any(),
                    "node below a hole": (real & ~real.gather(1, draft.parents.clamp_min(0))).any(),
                    "row without q": (probs.owner == -1).any(),
                    "q of zeros": ((probs.owner >= 0) & (probs.q.sum(-1) == 0)).any(),
                    "three siblings": probs.siblings == 3,
                    "drawn and chosen": (real & drawn).any() and (real & ~drawn).any(),
                    "rows of other sizes": len(set(real.sum(1).tolist())) > 1,
                    "empty row": (~real).all(1).any(),
                    "repeated sibling": draft.probs.replacement,
                }
                found.update(form for form, there in forms.items() if there)
            return draft

    for seed in range(3):
        for replacement in (False, True):
            drafter = Seen(3, seed, replacement=replacement)
            check_lossless(tiny_target(), drafter, Plan(2, 3, 20), Sampler(0.7), length=2, rows=[0])
    assert len(found) == 9, found


class Dropped(Grown):
    """Flat or steep q, so that what is drawn decides what is kept; counts drawn nodes that were not kept."""

    count = 0

    def logits(self, text):
        dice = self.dice(text)
        spread = dice.choice([0.1, 2.0])
        return torch.tensor([dice.gauss(0, spread) for _ in range(self.vocab)], dtype=torch.float64)

    def propose(self, *arguments):
        draft = super().propose(*arguments)
        if draft.probs is not None:
            self.count += int((draft.probs.owner == -1).sum())
        return draft


@pytest.mark.parametrize(
    "shape", [(3, 2, 4), *(pytest.param(shape, marks=pytest.mark.proof) for shape in [(4, 2, 6), (3, 3, 6)])]
)
def test_tree_that_keeps_its_best_nodes_is_lossless(tiny_target, shape):
    """The rerank over the whole tree drops drawn nodes, and what is drawn decides which."""
    plan, vocab = Plan(*shape, proposal="hybrid"), shape[1] + 1
    drafter = Dropped(vocab, 1, rounds=1)
    options = {"length": shape[0] + 2, "prompts": PROMPTS[:1], "abreast": 512}
    check_lossless(tiny_target(vocab=vocab), drafter, plan, Sampler(1.0), **options)
    assert drafter.count > 20


class Reduced(Grown):
    """A draft vocabulary without token 1: q is padded with a zero there."""

    def logits(self, text):
        return super().logits(text).index_fill(0, torch.tensor([1]), -torch.inf)


@pytest.mark.parametrize(
    "path", ["token", "block", "siblings", "siblings, traversal", "hybrid", "dynamic hybrid"]
)
def test_reduced_draft_vocabulary_is_lossless(tiny_target, path):
    plan = DRAWN.get(path, SAMPLED)
    check_lossless(tiny_target(), Reduced(3, 2), plan, Sampler(0.7), rows=[0])


class Overflowed(Grown):
    """Draft logits that are damaged at one level, below some of its parents."""

    def __init__(self, vocab: int, damage: str, level: int, rounds: float) -> None:
        super().__init__(vocab, 1, rounds)
        self.damage, self.damaged_level = damage.split(), level

    def logits(self, text):
        logits = super().logits(text)
        if self.level == self.damaged_level and text[-1] != 1:
            which, value = self.damage
            logits[slice(None) if which == "all" else 1] = float(value.replace("zero", "0"))
        return logits


# What reaches the rules is the same for all kinds (test_expand); one is enumerated in CI, by every rule.
FINITE = ["block", "siblings", "repeating siblings, traversal", "hybrid, matched", "wide dynamic hybrid"]
FINITE += ["confident chain, token", "two drafts, selected", "chosen chain", "chosen dynamic tree"]


@pytest.mark.parametrize("damage", ["one nan", "one +inf", "all -inf", "all zero"])
@pytest.mark.parametrize("path", [*DRAWN, "chosen chain", "chosen tree", "chosen dynamic tree"])
@pytest.mark.ci(*[f"{path}-one nan" for path in FINITE])
def test_draft_logits_that_are_not_finite_are_lossless(tiny_target, path, damage):
    """fp16 overflows: NaN at any depth of a draft may cost speed, and changes no distribution."""
    chosen = {"chosen chain": CHAIN, "chosen tree": Plan(tree=BUSHY), "chosen dynamic tree": TREE}
    plan = DRAWN.get(path) or chosen[path]
    vocab = 2 if "drafts" in path else 4 if "three" in path or plan.width > 2 else 3
    for level in range(plan.depth):
        drafter = Overflowed(vocab, damage, level, rounds=1)
        prompts = PROMPTS[:1] if vocab > 2 else [[1, 0, 0]]
        check_lossless(tiny_target(vocab=vocab), drafter, plan, Sampler(0.7), prompts=prompts)


@pytest.mark.parametrize("path", ["block", "hybrid", "hybrid, traversal", "chain, matched"])
@pytest.mark.parametrize("warper", ["none", "penalty"])
@pytest.mark.ci("none-hybrid, traversal", "penalty-hybrid")
def test_rows_that_stop_and_join_a_batch_are_lossless(tiny_target, path, warper):
    """A batch of three, which the other plays join as rows end, at an end token or at the third token."""
    drafter, sampler = Grown(3, 1), WARPERS.get(warper, Sampler(0.7))
    options = {"stop": [2], "abreast": 9, "batch_size": 3, "rows": [0]}
    check_lossless(tiny_target(), drafter, DRAWN[path], sampler, **options)


@pytest.mark.parametrize("rule", ["block", "traversal", "token"])
def test_rounds_are_lossless_with_the_keys_of_the_production_coin(tiny_target, rule):
    """Each draw is known by its Philox number: were one used twice, two decisions would agree."""
    most = 0

    class Counted(Grown):
        def over(self):
            nonlocal most
            most = max(most, self.turn + 1)
            return super().over()

    options = {"length": 5, "prompts": [[1, 0, 0, 1]], "abreast": 512, "tosses": RealKeys}
    plan = replace(SAMPLED, rule=rule)
    check_lossless(tiny_target(vocab=2), Counted(2, 3), plan, Sampler(0.7), **options)
    assert most >= 3


@pytest.mark.parametrize(
    "path",
    ["match", "token", "block", "siblings", "siblings, traversal", "hybrid, traversal", "dynamic hybrid"],
)
@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.covering
def test_every_rule_is_lossless_under_every_warper(tiny_target, warper, path):
    """Below a prompt of one token: penalties have yet to begin, and differ from slot to slot."""
    plan = {"match": TREE, "token": SAMPLED, **DRAWN}[path]
    check_lossless(tiny_target(), Grown(3, 1), plan, WARPERS[warper], rows=[1])


BY_DRAFTERS = {"chosen chain": CHAIN, "chosen tree": TREE, "token": SAMPLED}
PATHS = ("block", "siblings", "hybrid, traversal", "wide dynamic hybrid")
BY_DRAFTERS |= {path: DRAWN[path] for path in PATHS}


@pytest.mark.parametrize("path", BY_DRAFTERS)
@pytest.mark.parametrize("sampler", [Sampler(0.7), Sampler(0.0), WARPERS["all"]], ids=["0.7", "0", "all"])
@pytest.mark.covering
@pytest.mark.states
def test_every_rule_with_every_drafter_is_lossless(tiny_target, make_drafter, drafter_name, path, sampler):
    target, plan = tiny_target(), BY_DRAFTERS[path]
    drafter = able(make_drafter(drafter_name, target), plan)
    check_lossless(drafter.verifier(target), drafter, plan, sampler, rows=[0])


@pytest.mark.parametrize("path", ["block", "hybrid, traversal"])
@pytest.mark.covering
@pytest.mark.states
def test_rows_that_join_with_every_drafter_are_lossless(tiny_target, make_drafter, drafter_name, path):
    target = tiny_target()
    drafter = able(make_drafter(drafter_name, target), DRAWN[path])
    options = {"stop": [2], "abreast": 9, "batch_size": 3, "rows": [0]}
    check_lossless(drafter.verifier(target), drafter, DRAWN[path], Sampler(0.7), **options)


@pytest.mark.parametrize("window", [None, 2, 4])
def test_trees_of_three_levels_and_sliding_windows_are_lossless(tiny_target, window):
    """A window shorter than a path, so that it ends inside the tree, and a longer one."""
    target = tiny_target(window=window)
    check_lossless(target, FixedTrees(3, 2), DEEP, Sampler(1.0), length=5, rows=[0])


SAME_TEXT = {"max_new_tokens": 24, "seed": 5, "stop": [4]}  # where no token is weighed by q
FOUR_PROMPTS = [[1, 2, 0, 1], [2], [0, 4, 2], [3, 3]]


@pytest.mark.parametrize("rule", ["match", "recursive", "traversal"])
@pytest.mark.parametrize("sampler", [Sampler(1.0), WARPERS["all"]], ids=["1", "all"])
@pytest.mark.covering
def test_chosen_drafts_give_the_text_of_plain_sampling(tiny_target, sampler, rule):
    target, options = tiny_target(vocab=5), SAME_TEXT | {"sampler": sampler}
    plain = [o.tokens for o in generate(target, None, FOUR_PROMPTS, **options).outputs]
    for seed in range(3):
        run = generate(target, FixedTrees(5, seed), FOUR_PROMPTS, plan=replace(TREE, rule=rule), **options)
        assert [o.tokens for o in run.outputs] == plain
        assert any(sum(o.accepted) for o in run.outputs)


@pytest.mark.parametrize("rule", ["match", "select"])
@pytest.mark.covering
@pytest.mark.states
def test_matched_drafts_give_the_text_of_plain_sampling(tiny_target, make_drafter, drafter_name, rule):
    target, plan = tiny_target(vocab=12), Plan(3, proposal="sampled", drafts=3, rule=rule)
    drafter = able(make_drafter(drafter_name, target), plan)
    target, options = drafter.verifier(target), SAME_TEXT | {"sampler": Sampler(0.8)}
    plain = [o.tokens for o in generate(target, None, FOUR_PROMPTS, **options).outputs]
    run = generate(target, drafter, FOUR_PROMPTS, plan=plan, **options)
    assert [o.tokens for o in run.outputs] == plain
    assert any(sum(o.accepted) for o in run.outputs)
    assert {n for o in run.outputs for n in o.drafted} == {9}


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


@pytest.mark.parametrize(("seed", "stop"), [(0, []), (2, [3])])
def test_drafter_gets_the_settled_tokens_and_their_taps(tiny_target, seed, stop):
    target = tiny_target(vocab=4)
    target.tap([0, 1, "last"])
    drafter, prompts = Recorder(4, seed), PROMPTS * 3
    options = {"max_new_tokens": 10, "sampler": Sampler(1.0), "plan": TREE, "stop": stop, "seed": seed}
    run = generate(target, drafter, prompts, **options)
    finished = [[*p, *o.tokens] for p, o in zip(prompts, run.outputs, strict=True)]
    for texts in drafter.joined:
        assert all(any(full[: len(t)] == t for full in finished) for t in texts)
    assert len(drafter.joined) > 3
