"""The tests have teeth: each known bug, put into the code, makes a named test fail.

A mutant replaces one snippet in the source of one function and swaps the function's code object
in place, so that every reference to it is mutated; monkeypatch puts it back.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from exact import FixedTrees
from faces import both

from decode.plan import Plan
from decode.sampling import Sampler


class Mutant(NamedTuple):
    """A bug: in function `where`, `right` becomes `wrong`, and test `killer` must fail."""

    where: str
    right: str
    wrong: str
    killer: str
    arguments: dict[str, Any]


ONE = Sampler(1.0)
EAGLE = {"drafter_name": "eagle"}
CHAIN = Plan(depth=3)
BUSHY = {"drafter": FixedTrees(3), "plan": Plan(2, 2, 5)}
EXACT = "test_exact_decoding:test_"
FACES = "test_drafters:test_decoding_computes_the_laws_that_training_taught"
LEVELS = "test_drafters:test_every_level_of_a_tree_computes_the_laws_that_training_taught"
ROWS = EXACT + "every_slots_row_is_that_of_a_plain_pass_over_its_path"
TREES = (EXACT + "match_on_trees_is_lossless", {"temperature": 0.5, "seed": 0})
LONE = (EXACT + "a_row_is_exact_in_a_batch_of_three_replayed_one_by_one", {})
CHAINS = (EXACT + "match_on_chains_is_lossless", {"temperature": 0.5})
TOKEN = (EXACT + "token_is_lossless_past_a_chain_accepted_whole", {"temperature": 0.5})
TOLD = (EXACT + "a_drafter_is_told_the_settled_tokens_and_their_own_taps", {"seed": 0, "stop": []})
PLAIN = (EXACT + "match_reproduces_plain_sampling_token_for_token", {"sampler": ONE})
ENDS = (EXACT + "nothing_follows_an_end_token_and_counts_are_cut_there", {"stop": [2]})
STOPS = (EXACT + "nothing_follows_an_end_token_and_counts_are_cut_there", {"stop": [0, 3]})
GOLDEN = "test_drafters:test_anchors_depths_and_teacher_rows_are_where_the_conventions_say"

MUTANTS = {
    # -- the target's pass over a tree
    "position = slot index": Mutant(
        "decode.target:Target.extend", "block.sum(-1) - 1", "torch.arange(block.shape[1])", *TREES
    ),
    "siblings visible": Mutant(
        "decode.target:Target.extend",
        "draft.ancestors()",
        "torch.ones_like(draft.ancestors()).tril()",
        *TREES,
    ),
    "ancestors stop at the grandparent": Mutant(
        "decode.draft:Draft._ancestors",
        "range(self.depth.bit_length())",
        "range(self.depth.bit_length() - 1)",
        ROWS,
        {"window": None},
    ),
    "window ignored": Mutant(
        "decode.cache:attention_mask", "if window is not None:", "if False:", ROWS, {"window": 2}
    ),
    "window by slot, not by position": Mutant(
        "decode.cache:attention_mask", ".scatter(1, where, positions)", "", ROWS, {"window": 2}
    ),
    "window one too wide": Mutant(
        "decode.cache:attention_mask",
        "key_position[:, None] < window",
        "key_position[:, None] <= window",
        ROWS,
        {"window": 2},
    ),
    "block of the mask at the longest row's end": Mutant(
        "decode.cache:attention_mask",
        "settled[:, None] + torch.arange(behind",
        "settled.max().expand_as(settled)[:, None] + torch.arange(behind",
        *CHAINS,
    ),
    # -- the row cache
    "cropped, not compacted": Mutant(
        "decode.generate:_Loop.round",
        "target.keep(counts, None if draft.is_chain else verdict.slots)",
        "target.keep(counts)",
        *TREES,
    ),
    "compaction mixes rows": Mutant(
        "decode.cache:RowStore.keep",
        "torch.tensor(self.lengths) + torch.arange(rows) * self.capacity",
        "torch.tensor(self.lengths)",
        *TREES,
    ),
    "writing mixes rows": Mutant(
        "decode.cache:RowStore._flat_index",
        "torch.tensor(self.lengths) + torch.arange(len(self.lengths)) * self.capacity",
        "torch.tensor(self.lengths)",
        *CHAINS,
    ),
    "only keys are compacted": Mutant(
        "decode.cache:RowStore.keep",
        "(start + torch.arange(kept, device=device)).flatten()] = moved",
        "(start + torch.arange(kept, device=device)).flatten()][::2] = moved[::2]",
        *TREES,
    ),
    "select drops the wrong row": Mutant(
        "decode.cache:RowStore.select",
        "self._data[:, :, list(rows)]",
        "self._data[:, :, : len(rows)]",
        EXACT + "rows_that_stop_on_their_own_leave_the_others_exact",
        BUSHY,
    ),
    "growing forgets": Mutant(
        "decode.cache:RowStore.begin",
        "self._data[:, :, :, : old.shape[3]] = old",
        "pass",
        "test_drafters:test_the_target_as_its_own_drafter_is_accepted_whole",
        {"plan": CHAIN, "sampler": Sampler(0.0)},
    ),
    "a rejected chain stays": Mutant(
        "decode.generate:_Loop.round",
        "[a + 1 for a in self._accepted]",
        "[draft.depth + 1 for a in self._accepted]",
        *CHAINS,
    ),
    # -- the rules
    "wrong p row": Mutant(
        "decode.verify:match",
        "rows.law(slot)",
        "rows.law((slot - 1).clamp_min(0))",
        "test_verify:test_match_has_the_law_of_its_closed_form",
        {"sampler": "0.5", "tree": "deep"},
    ),
    "any node is a child": Mutant(
        "decode.verify:match",
        "(draft.parents == slot[:, None] - 1) & (draft.tokens == y[:, None])",
        "draft.tokens == y[:, None]",
        "test_verify:test_match_has_the_law_of_its_closed_form",
        {"sampler": "1", "tree": "deep"},
    ),
    "padding is token 0": Mutant(
        "decode.verify:match",
        "(draft.tokens == y[:, None])",
        "(draft.tokens.clamp_min(0) == y[:, None])",
        "test_verify:test_padding_matches_no_token_not_even_the_first",
        {"rule": "match"},
    ),
    "padding is accepted": Mutant(
        "decode.verify:token",
        "active & keep & real",
        "active & keep",
        "test_verify:test_padding_matches_no_token_not_even_the_first",
        {"rule": "token"},
    ),
    "an inactive row descends": Mutant(
        "decode.verify:match",
        "active & child.any(-1)",
        "child.any(-1)",
        "test_verify:test_match_has_the_law_of_its_closed_form",
        {"sampler": "1", "tree": "deep"},
    ),
    "p instead of the residual": Mutant(
        "decode.verify:token",
        "(p - law).clamp_min(0)",
        "p",
        "test_verify:test_token_has_the_law_of_its_closed_form",
        {"sampler": "1", "depth": 1},
    ),
    "p instead of the residual, in the loop": Mutant(
        "decode.verify:token", "(p - law).clamp_min(0)", "p", *TOKEN
    ),
    "extra token without temperature": Mutant(
        "decode.verify:token",
        "rows.law(torch.full_like(accepted, draft.depth))",
        "rows._logits[:, -1].softmax(-1)",
        "test_verify:test_token_has_the_law_of_its_closed_form",
        {"sampler": "0.5", "depth": 2},
    ),
    "extra token without temperature, in the loop": Mutant(
        "decode.verify:token",
        "rows.law(torch.full_like(accepted, draft.depth))",
        "rows._logits[:, -1].softmax(-1)",
        *TOKEN,
    ),
    "residual of a later depth": Mutant(
        "decode.verify:token",
        "torch.where(active[:, None], rejected, residual)",
        "rejected",
        "test_verify:test_token_has_the_law_of_its_closed_form",
        {"sampler": "1", "depth": 2},
    ),
    "padding has a residual": Mutant("decode.verify:token", " * real[:, None]", "", *TOKEN),
    "zero residual": Mutant(
        "decode.verify:token",
        "torch.where(rejected.sum(-1, keepdim=True) > 0, rejected, p)",
        "rejected",
        "test_verify:test_a_residual_of_zero_falls_back_to_the_targets_law",
        {},
    ),
    "penalty ignores the path": Mutant(
        "decode.verify:Rows.follow",
        "|= active",
        "|= False",
        "test_verify:test_match_has_the_law_of_its_closed_form",
        {"sampler": "penalty", "tree": "deep"},
    ),
    "penalty writes into the sequence": Mutant(
        "decode.verify:Rows.__init__",
        "seen.clone()",
        "seen",
        "test_verify:test_match_has_the_law_of_its_closed_form",
        {"sampler": "penalty", "tree": "siblings"},
    ),
    "penalty forgets what was emitted": Mutant(
        "decode.generate:_Loop._carry",
        "self.seen.scatter_(1,",
        "self.seen.clone().scatter_(1,",
        EXACT + "match_is_lossless_under_every_warper",
        {"warper": "penalty"},
    ),
    "chosen tokens pass for sampled ones": Mutant(
        "decode.verify:verify",
        "needs_laws and draft.q is None and draft.depth",
        "False",
        "test_verify:test_token_refuses_tokens_that_were_chosen",
        {},
    ),
    # -- the coin
    "accept without strictness": Mutant(
        "decode.coin:KeyedCoin.flip",
        "< accept.double()",
        "<= accept.double()",
        "test_coin:test_no_flip_accepts_a_token_without_mass",
        {"value": 0.0},
    ),
    "a draw may have no weight": Mutant(
        "decode.coin:KeyedCoin.draw",
        "right=True",
        "right=False",
        "test_coin:test_no_draw_returns_a_token_without_weight",
        {"value": 0.0, "dtype": torch.float64},
    ),
    "a cumulative sum in fp32": Mutant(
        "decode.coin:KeyedCoin.draw",
        "weights.double().cumsum(-1)",
        "weights.cumsum(-1).double()",
        "test_coin:test_the_far_tail_of_a_large_vocabulary_is_reachable",
        {},
    ),
    "a key without the round": Mutant(
        "decode.coin:KeyedCoin._block",
        "zero + self._round[:, None]",
        "zero",
        "test_coin:test_no_two_decisions_share_a_draw",
        {},
    ),
    "a key without the slot": Mutant(
        "decode.coin:KeyedCoin._block",
        "zero + slots",
        "zero",
        "test_coin:test_no_two_decisions_share_a_draw",
        {},
    ),
    "a key without the purpose": Mutant(
        "decode.coin:KeyedCoin._block",
        "np.uint64(purpose)",
        "np.uint64(0)",
        "test_coin:test_no_two_decisions_share_a_draw",
        {},
    ),
    "the position does not count slots": Mutant(
        "decode.coin:KeyedCoin._block",
        "self._position[:, None] + slots",
        "self._position[:, None] + zero",
        *PLAIN,
    ),
    "select keeps the first rows' keys": Mutant(
        "decode.coin:KeyedCoin.select",
        "self._key[index]",
        "self._key[: len(index)]",
        "test_coin:test_select_then_at_keeps_each_rows_key",
        {},
    ),
    "position off by one": Mutant(
        "decode.generate:_Loop._settle", "np.array(self._accepted) + 1", "np.array(self._accepted)", *PLAIN
    ),
    "rounds do not count": Mutant("decode.generate:_Loop._settle", "(0 if first else 1)", "0", *TOKEN),
    "53 bits are 52": Mutant(
        "decode.coin:KeyedCoin._block",
        "words[1] >> np.uint64(11)",
        "words[1] >> np.uint64(12)",
        "test_coin:test_the_largest_word_is_below_one_and_53_bits_wide",
        {},
    ),
    # -- the loop
    "stale root": Mutant(
        "decode.generate:_Loop._carry",
        "verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]",
        "verdict.tokens[:, 0]",
        *TOLD,
    ),
    "taps of the first slots, not of the path": Mutant(
        "decode.generate:_Loop.round", "read.taps[row, path]", "read.taps[:, : path.shape[1]]", *TOLD
    ),
    "taps of rows that left": Mutant(
        "decode.generate:_Loop._carry",
        "taps[running], root[running]",
        "taps[: len(running)], root[running]",
        EXACT + "a_drafter_is_told_the_settled_tokens_and_their_own_taps",
        {"seed": 2, "stop": [3]},
    ),
    "the drafter keeps rows that left": Mutant(
        "decode.generate:_Loop._carry",
        "self.drafter.select(self.state, running)",
        "pass",
        EXACT + "a_drafter_is_told_the_settled_tokens_and_their_own_taps",
        {"seed": 2, "stop": [3]},
    ),
    "the end token is not trimmed before counting": Mutant(
        "decode.generate:_Loop._settle", "tokens[: end + 1], True", "tokens, True", *ENDS
    ),
    "only the last token may be an end": Mutant(
        "decode.generate:_Loop._settle",
        "for i, t in enumerate(tokens) if",
        "for i, t in [(0, tokens[0])] if",
        *STOPS,
    ),
    "one token too many": Mutant(
        "decode.generate:_limits",
        "limits.append(room)",
        "limits.append(room + 1)",
        EXACT + "no_more_tokens_are_emitted_than_were_asked_for",
        {"length": 2},
    ),
    "the context's end is ignored": Mutant(
        "decode.generate:_limits",
        "min(room, target.max_positions - len(prompt))",
        "room",
        EXACT + "drafts_past_the_end_of_the_context_change_nothing",
        {},
    ),
    # -- the law
    "top-p drops the token that reaches it": Mutant(
        "decode.sampling:Sampler.law",
        "before >= self.top_p",
        "ordered.softmax(-1).cumsum(-1) >= self.top_p",
        "test_sampling:test_the_law_is_that_of_transformers",
        {"temperature": 1.0},
    ),
    "top-k is forgotten beside top-p": Mutant(
        "decode.sampling:Sampler.law",
        "if 0 < self.top_k < z.shape[-1]:",
        "if self.top_p == 1 and 0 < self.top_k < z.shape[-1]:",
        "test_sampling:test_the_law_is_that_of_transformers",
        {"temperature": 1.0},
    ),
    "negative logits are divided too": Mutant(
        "decode.sampling:Sampler.law",
        "z * penalty",
        "z / penalty",
        "test_sampling:test_the_law_is_that_of_transformers",
        {"temperature": 1.0},
    ),
    "the last of a tie": Mutant(
        "decode.sampling:Sampler.law",
        "z.argmax(-1, keepdim=True)",
        "z.shape[-1] - 1 - z.flip(-1).argmax(-1, keepdim=True)",
        "test_sampling:test_temperature_zero_takes_the_lowest_index_of_a_tie",
        {},
    ),
    # -- drafters
    "token not shifted": Mutant(
        "drafters.eagle:Eagle.advance",
        "tokens.roll(-1, 1).scatter(1, end, root[:, None])",
        "tokens",
        FACES,
        EAGLE,
    ),
    "the last pair wraps around": Mutant(
        "drafters.eagle:Eagle.advance", ".scatter(1, end, root[:, None])", "", FACES, EAGLE
    ),
    "features of wrong rows": Mutant(
        "drafters.eagle:Eagle.advance", "taps[:, :, 0]", "taps[:, :, 0].roll(1, 1)", FACES, EAGLE
    ),
    "stale drafter cache": Mutant(
        "drafters.eagle:Eagle.advance", "state.store.keep(counts)", "pass", FACES, EAGLE
    ),
    "the prediction at the padding": Mutant(
        "drafters.eagle:Eagle.advance",
        "feature.gather(1, end[..., None].expand(-1, -1, feature.shape[-1]))",
        "feature[:, -1:]",
        FACES,
        EAGLE,
    ),
    "a level overwrites the one above": Mutant(
        "decode.cache:RowStore.begin",
        "self._new, self._scratch = new, scratch",
        "self._new, self._scratch = new, 0",
        FACES,
        EAGLE,
    ),
    "a level sees its cousins": Mutant(
        "drafters.eagle:Eagle.propose",
        "own = torch.eye(token.shape[1], dtype=torch.bool, device=token.device)",
        "own = torch.ones(token.shape[1], token.shape[1], dtype=torch.bool)",
        LEVELS,
        EAGLE,
    ),
    "a child of the wrong beam": Mutant(
        "drafters.eagle:Eagle.propose",
        "reach.gather(1, parent[..., None].expand(-1, -1, reach.shape[-1]))",
        "reach",
        LEVELS,
        EAGLE,
    ),
    "a child of another's feature": Mutant(
        "drafters.eagle:Eagle.propose",
        "feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))",
        "feature.expand(-1, parent.shape[1], -1)",
        LEVELS,
        EAGLE,
    ),
    "positions are slots in a drafter's tree": Mutant(
        "drafters.eagle:Eagle._forward",
        "block.sum(-1) - 1",
        "scratch + torch.arange(block.shape[1])",
        LEVELS,
        EAGLE,
    ),
    "the unroll does not move on": Mutant(
        "drafters.eagle:Eagle.unroll", "[depth - 1 : length + depth - 1]", "[:length]", FACES, EAGLE
    ),
    "the unroll's tokens do not move on": Mutant(
        "drafters.eagle:Eagle.unroll", "roll(-depth, 1)", "roll(-1, 1)", FACES, EAGLE
    ),
    "an anchor forgets its own steps": Mutant(
        "drafters.layers:attend_unrolled",
        "weight[..., length + step, None]",
        "weight[..., length, None]",
        FACES,
        EAGLE,
    ),
    "teacher row off by one": Mutant(
        "drafters.eagle:Eagle.unroll",
        "[anchor + depth]",
        "[anchor + depth - 1]",
        GOLDEN,
        EAGLE | {"mask": "answer"},
    ),
    "loss mask off by one": Mutant(
        "drafters.base:supervised",
        "shifted[:, : -(1 + j)] = loss_mask[:, 1 + j :]",
        "shifted[:, :-j] = loss_mask[:, j:]",
        GOLDEN,
        EAGLE | {"mask": "answer"},
    ),
    "an anchor comes back": Mutant(
        "drafters.base:supervised",
        "alive = alive & shifted",
        "alive = shifted",
        GOLDEN,
        EAGLE | {"mask": "turns"},
    ),
    "the selected features are the first": Mutant(
        "drafters.eagle:Eagle.select",
        "state.feature[list(rows)]",
        "state.feature[: len(rows)]",
        "test_drafters:test_select_keeps_these_rows_in_this_order",
        EAGLE | {"rows": [2, 0]},
    ),
    "q at another temperature": Mutant(
        "drafters.expand:_chain",
        "coin.draw(laws[-1],",
        "coin.draw(logits.softmax(-1),",
        EXACT + "token_with_a_drafter_is_lossless",
        EAGLE | {"sampler": Sampler(0.5)},
    ),
    "q of the sampler's defaults": Mutant(
        "drafters.expand:_chain",
        "Sampler(sampler.temperature,",
        "Sampler(1.0,",
        "test_drafters:test_a_sampled_chains_laws_are_warped_as_the_sampler_says",
        EAGLE,
    ),
    "one key for every drafted token": Mutant(
        "drafters.expand:_chain",
        "Key(Purpose.PROPOSE, depth)",
        "Key(Purpose.PROPOSE, 0)",
        EXACT + "token_with_a_drafter_is_lossless",
        EAGLE | {"sampler": Sampler(0.5)},
    ),
    "a beam's parent is its rank": Mutant(
        "drafters.expand:_tree",
        "beam_parent, slot = best // width,",
        "beam_parent, slot = best % width,",
        "test_expand:test_a_tree_is_the_best_of_eagle_2s_expansion",
        {"plan": Plan(3, 3, 7)},
    ),
    "a path's score is its last token's": Mutant(
        "drafters.expand:_tree",
        "score[..., None] + child",
        "child",
        "test_expand:test_a_tree_is_the_best_of_eagle_2s_expansion",
        {"plan": Plan(3, 3, 7)},
    ),
    "another target's drafter is loaded": Mutant(
        "drafters.hub:load",
        'made_for.get("fingerprint") != target.fingerprint()',
        "False",
        "test_hub:test_another_targets_drafter_is_refused",
        EAGLE,
    ),
}


def mutate(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    module, _, name = mutant.where.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = inspect.getattr_static(function, part)
    function = inspect.unwrap(getattr(function, "func", function))  # of a cached property
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.right) == 1, f"{mutant.right!r} is not in {mutant.where} exactly once"
    # Compiling the text of a function, not running it, is enough to get at its code.
    whole = compile(
        source.replace(mutant.right, mutant.wrong), f"<mutant of {name}>", "exec", dont_inherit=True
    )
    (code,) = (c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
    assert code.co_freevars == function.__code__.co_freevars
    monkeypatch.setattr(function, "__code__", code)


def run(request: pytest.FixtureRequest, killer: str, arguments: dict[str, Any]) -> None:
    """Call a test by name; what it wants beyond `arguments` are fixtures."""
    file, _, name = killer.partition(":")
    module = importlib.import_module(file)
    test = getattr(module, name)
    wanted = {}
    for parameter in inspect.signature(test).parameters:
        if parameter in arguments:
            wanted[parameter] = arguments[parameter]
        elif parameter == "pair":
            make = [request.getfixturevalue(f) for f in ("tiny_target", "make_drafter")]
            wanted[parameter] = both(*make, arguments["drafter_name"])
        else:
            wanted[parameter] = request.getfixturevalue(parameter)
    test(**wanted)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_is_noticed(monkeypatch, request, name):
    mutant = MUTANTS[name]
    mutate(monkeypatch, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception)):  # the latter where nothing was raised
        run(request, mutant.killer, mutant.arguments)


KILLERS = {f"{m.killer} {m.arguments}": (m.killer, m.arguments) for m in MUTANTS.values()}


@pytest.mark.parametrize(
    "killer", KILLERS.values(), ids=[m[0].partition(":test_")[2] for m in KILLERS.values()]
)
def test_what_notices_a_bug_passes_without_it(request, killer):
    run(request, *killer)
