"""Known bugs, each with the test that must notice it.

A mutant replaces one snippet in the source of one function and swaps the function's code object
in place, so that every reference to it is mutated; monkeypatch puts it back.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from exact import FixedTrees
from faces import both
from workbench import ROOT

from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Purpose
from decode.sampling import Sampler
from distill.losses.weights import Streak, constant
from drafters.models.mlp import Lstm, Mlp


class Mutant(NamedTuple):
    """A bug: in function `where`, `right` becomes `wrong`, and test `killer` must fail."""

    where: str
    right: str
    wrong: str
    killer: str
    arguments: dict[str, Any]


ONE = Sampler(1.0)
EAGLE = {"drafter_name": "eagle"}
EAGLE3 = {"drafter_name": "eagle3"}
DENSE = "test_eagle3:test_an_unroll_of_supervised_anchors_is_the_dense_unroll"
MODULES = (
    "test_variants:test_an_unroll_with_modules_is_the_dense_one",
    {"order": [0, 1, 2], "detach": False},
)
PATCHY = {"masks": ["010111011101", "111011000000"]}
PLAINLY = PATCHY | {"name": "plain"}
LM = {"drafter_name": "lm"}
MEDUSA, MEDUSA2, MLP, LSTM = ({"drafter_name": name} for name in ("medusa", "medusa2", "mlp", "lstm"))
FORMULA = ("test_hydra:test_every_law_is_that_of_the_formula", {"form": {"own_head": True, "layers": 1}})
DLLM = {"drafter_name": "hf_dllm"}
PASS = ("test_dllm:test_every_law_is_that_of_one_plain_pass", {"kind": "llama", "shift": 1})
SEEN = ("test_dllm:test_every_place_reads_every_other_and_no_padding", {"kind": "llama"})
SAMPLE = ("test_dllm:test_training_takes_a_sample_that_stands_for_all", {})
STEPS = ("test_dllm:test_with_more_passes_the_surest_masks_are_filled_first", {"steps": 2})
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
PLAIN = (EXACT + "chosen_drafts_reproduce_plain_sampling_token_for_token", {"sampler": ONE, "rule": "match"})
ENDS = (EXACT + "nothing_follows_an_end_token_and_counts_are_cut_there", {"stop": [2]})
STOPS = (EXACT + "nothing_follows_an_end_token_and_counts_are_cut_there", {"stop": [0, 3]})
GOLDEN = "test_drafters:test_anchors_depths_and_teacher_rows_are_where_the_conventions_say"

WALK, TRY, LEAVES = "decode.verify:_walk", "decode.verify:_try_sampled", "decode.verify:_leaf_chances"
FAIL, TRAVERSAL, GROWTH = (
    "decode.verify:_fail_sampled",
    "decode.verify:traversal",
    "drafters.drafting.tree:_Growth",
)
DYNAMIC, STATIC, FORM = (
    "drafters.drafting.tree:_beam",
    "drafters.drafting.tree:_static",
    "drafters.drafting.tree:_form",
)
SIDE, DRAWS = "drafters.drafting.chain:side_by_side", "decode.rng:KeyedCoin._draws"
UNSURE = (
    "test_expand:test_a_chain_ends_before_the_product_of_its_laws_largest_chances_is_too_small",
    {"proposal": "sampled", "temperature": 0.7},
)
SURE = ("test_confidence:test_a_head_is_asked_of_the_states_that_training_taught_and_ends_chains_by_them",)
SHARE = ("test_expand:test_drafts_side_by_side_hang_from_the_first_that_begins_as_they_do", {"count": 5})
SELECT = ("test_verify:test_select_is_match_on_the_path_that_is_expected_to_keep_most", {"sampler": "1"})
CLOSED = ("test_verify:test_token_has_the_law_of_its_closed_form", {"sampler": "1", "depth": 2})
PADDED = "test_verify:test_padding_matches_no_token_not_even_the_first"
BEST = ("test_expand:test_a_tree_is_the_best_of_eagle_2s_expansion", {"plan": Plan(3, 3, 7)})
HYBRID = (
    "test_expand:test_a_dynamic_hybrid_keeps_the_best_of_drawn_and_likeliest_children",
    {"shape": (3, 3, 7)},
)
RANKED = (EXACT + "a_tree_that_keeps_its_best_nodes_is_lossless", {"shape": (3, 2, 4)})
TRANSPORT = (
    "test_verify:test_a_hybrid_node_reaches_the_optimal_transport_bound",
    {"width": 2, "rule": "recursive"},
)
ABSENT = "test_expand:test_children_that_no_vocabulary_has_are_absent"
FORKED = ((0,), (1,), (0, 0), (1, 0), (1, 1))
SHARED = "test_coin:test_no_two_decisions_share_a_draw"


def matched(tree: str, sampler: str = "1") -> tuple[str, dict[str, Any]]:
    return "test_verify:test_match_has_the_law_of_its_closed_form", {"sampler": sampler, "tree": tree}


def oracle(rule: str, form: str) -> tuple[str, dict[str, Any]]:
    return "test_verify:test_every_draft_is_verified_as_by_the_oracle", {"rule": rule, "form": form}


def chosen(tree: str) -> tuple[str, dict[str, Any]]:
    """All nodes, by `traversal`."""
    name = "test_verify:test_where_all_nodes_are_chosen_the_rules_are_one_law"
    return name, {"rule": "traversal", "tree": tree}


def drawn(path: str) -> tuple[str, dict[str, Any]]:
    return EXACT + "every_rule_is_lossless_on_what_is_drawn", {"path": path, "temperature": 0.7}


def weighted(name: str, vocabulary: str) -> tuple[str, dict[str, Any]]:
    test = "test_objectives:test_the_loss_is_the_weighted_sum_of_divergences_at_the_right_rows"
    return test, {"name": name, "vocabulary": vocabulary}


def differentiated(name: str, weights: str = "decay", heads: str = "frozen") -> tuple[str, dict[str, Any]]:
    test = "test_objectives:test_every_gradient_is_that_of_the_whole_loss"
    rest = {"vocabulary": "reduced", "heads": heads, "chunk": 2}
    return test, {"name": name, "weights": weights, **rest}


def refused(name: str) -> tuple[str, dict[str, Any]]:
    return "test_wrong_variants:test_what_would_not_be_lossless_is_refused_and_why", {"name": name}


def rounds(rule: str) -> tuple[str, dict[str, Any]]:
    return EXACT + "rounds_are_lossless_with_the_keys_of_the_production_coin", {"rule": rule}


def laws(plan: Plan) -> tuple[str, dict[str, Any]]:
    name = "test_expand:test_every_drawn_node_has_the_law_it_was_drawn_from"
    return name, {"plan": plan, "sampler": ONE}


def form(proposal: str, sampler: Sampler = ONE) -> tuple[str, dict[str, Any]]:
    name = "test_expand:test_a_static_tree_has_the_form_it_was_given"
    return name, {"proposal": proposal, "sampler": sampler}


MUTANTS = {
    # -- the target's pass over a tree
    "position = slot index": Mutant(
        "decode.model.causal_lm:CausalLM.forward", "block.sum(-1) - 1", "torch.arange(block.shape[1])", *TREES
    ),
    "siblings visible": Mutant(
        "decode.model.target:Target.extend",
        "draft.ancestors()",
        "torch.ones_like(draft.ancestors()).tril()",
        *TREES,
    ),
    "ancestors stop at the grandparent": Mutant(
        "decode.draft:Draft._ancestors",
        "range((self.depth - 1).bit_length())",
        "range((self.depth - 1).bit_length() - 1)",
        ROWS,
        {"window": None},
    ),
    "window ignored": Mutant(
        "decode.model.cache:attention_mask", "if window is not None:", "if False:", ROWS, {"window": 2}
    ),
    "window by slot, not by position": Mutant(
        "decode.model.cache:attention_mask", ".scatter(1, where, positions)", "", ROWS, {"window": 2}
    ),
    "window one too wide": Mutant(
        "decode.model.cache:attention_mask",
        "key_position[:, None] < window",
        "key_position[:, None] <= window",
        ROWS,
        {"window": 2},
    ),
    "block of the mask at the longest row's end": Mutant(
        "decode.model.cache:attention_mask",
        "settled[:, None] + torch.arange(behind",
        "settled.max().expand_as(settled)[:, None] + torch.arange(behind",
        *CHAINS,
    ),
    "a mask forgotten for ragged rows": Mutant(
        "decode.model.causal_lm:CausalLM._mask", "len(set(store.lengths)) == 1", "True", FACES, LM
    ),
    # -- the row cache
    "cropped, not compacted": Mutant(
        "decode.generation.loop:Loop.round",
        "target.keep(counts, None if draft.is_chain else verdict.slots)",
        "target.keep(counts)",
        *TREES,
    ),
    "compaction mixes rows": Mutant(
        "decode.model.cache:RowStore.keep",
        "torch.tensor(self.lengths) + torch.arange(rows) * self.capacity",
        "torch.tensor(self.lengths)",
        *TREES,
    ),
    "writing mixes rows": Mutant(
        "decode.model.cache:RowStore._flat_index",
        "torch.tensor(self.lengths) + torch.arange(len(self.lengths)) * self.capacity",
        "torch.tensor(self.lengths)",
        *CHAINS,
    ),
    "only keys are compacted": Mutant(
        "decode.model.cache:RowStore.keep",
        "(start + torch.arange(kept, device=device)).flatten()] = moved",
        "(start + torch.arange(kept, device=device)).flatten()][::2] = moved[::2]",
        *TREES,
    ),
    "select drops the wrong row": Mutant(
        "decode.model.cache:RowStore.select",
        "if new != old:",
        "if False:",
        EXACT + "rows_that_stop_on_their_own_leave_the_others_exact",
        BUSHY,
    ),
    "growing forgets": Mutant(
        "decode.model.cache:RowStore.begin",
        "self._data[:, :, :, : old.shape[3]] = old",
        "pass",
        "test_drafters:test_the_target_as_its_own_drafter_is_accepted_whole",
        {"plan": CHAIN, "sampler": Sampler(0.0)},
    ),
    "a rejected chain stays": Mutant(
        "decode.generation.loop:Loop.round",
        "[a + 1 for a in self._accepted]",
        "[draft.depth + 1 for a in self._accepted]",
        *CHAINS,
    ),
    # -- the rules, from the root
    "wrong p row": Mutant(
        WALK, "rows.law(slot)", "rows.law((slot - 1).clamp_min(0))", *matched("deep", "0.5")
    ),
    "any node is a child": Mutant(WALK, "(draft.parents == slot[:, None] - 1) & ", "", *matched("deep")),
    "an inactive row descends": Mutant(WALK, "active & (child >= 0)", "(child >= 0)", *matched("deep")),
    "padding is token 0": Mutant(WALK, " & (draft.tokens != PAD)", "", PADDED, {"rule": "token"}),
    "padding is token 0, in the loop": Mutant(
        WALK,
        " & (draft.tokens != PAD)",
        "",
        EXACT + "rows_of_unlike_trees_are_lossless",
        {"rule": "recursive", "replacement": False, "seed": 0},
    ),
    "a drawn child that stands is drawn over": Mutant(
        WALK, "y = torch.where(child < 0, y, kept)", "pass", *oracle("recursive", "hybrid")
    ),
    "chosen children are matched with p": Mutant(
        WALK, "law, child = _try_sampled(", "_, child = _try_sampled(", *oracle("recursive", "hybrid")
    ),
    "one key for all depths": Mutant(WALK, "Key(purpose, depth)", "Key(purpose, 0)", *matched("deep")),
    "the law of another slot's children": Mutant(
        TRY, "laws.owner == slot[:, None]", "laws.owner >= 0", *oracle("recursive", "without")
    ),
    "a chosen child is weighed by q": Mutant(
        TRY, "waiting = below & laws.sampled", "waiting = below", *oracle("recursive", "hybrid")
    ),
    "siblings out of order": Mutant(
        TRY,
        "node = first(waiting)",
        "node = torch.where(waiting.any(-1), waiting.cumsum(-1).argmax(-1), -1)",
        *oracle("recursive", "without"),
    ),
    "siblings out of order, in the loop": Mutant(
        TRY,
        "node = first(waiting)",
        "node = torch.where(waiting.any(-1), waiting.cumsum(-1).argmax(-1), -1)",
        *drawn("siblings"),
    ),
    "a sibling is examined twice": Mutant(
        TRY,
        "waiting.scatter(1, node.clamp_min(0)[:, None], value=False)",
        "waiting",
        *oracle("recursive", "without"),
    ),
    "q is not struck": Mutant(TRY, "q if laws.replacement else struck(q, at)", "q", *drawn("siblings")),
    "q is struck though siblings repeat": Mutant(
        TRY,
        "q if laws.replacement else struck(q, at)",
        "struck(q, at)",
        *oracle("recursive", "with replacement"),
    ),
    "q is struck and left short": Mutant(
        "decode.verify:struck",
        "left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)",
        "left",
        *oracle("recursive", "without"),
    ),
    "p for every sibling": Mutant(
        TRY,
        "trying & ~keep)",
        "trying & ~keep & (rank + 1 == laws.siblings))",
        *oracle("recursive", "without"),
    ),
    "a residual where nothing was rejected": Mutant(
        TRY, "_without(law, q, trying & ~keep)", "_without(law, q, ~keep)", *oracle("recursive", "hybrid")
    ),
    "siblings are tried after one stands": Mutant(
        TRY, "(node >= 0) & (child < 0)", "(node >= 0)", *oracle("recursive", "without")
    ),
    "one key for all siblings": Mutant(
        TRY, "Key(Purpose.ACCEPT, depth, rank)", "Key(Purpose.ACCEPT, depth)", *oracle("recursive", "without")
    ),
    "p instead of the residual": Mutant("decode.verify:_without", "(law - q).clamp_min(0)", "law", *CLOSED),
    "p instead of the residual, in the loop": Mutant(
        "decode.verify:_without", "(law - q).clamp_min(0)", "law", *TOKEN
    ),
    "the residual the other way round": Mutant(
        "decode.verify:_without", "(law - q).clamp_min(0)", "(q - law).clamp_min(0)", *CLOSED
    ),
    "zero residual": Mutant(
        "decode.verify:_without",
        "where[..., None] & (mass > 0)",
        "where[..., None]",
        "test_verify:test_a_residual_of_zero_falls_back_to_the_targets_law",
        {"rule": "token"},
    ),
    "a law without its warpers": Mutant(
        "decode.verify:Rows.law",
        "self._sampler.law(self._logits[self._row, slot], self._seen)",
        "self._logits[self._row, slot].softmax(-1)",
        *TOKEN,
    ),
    "penalty ignores the path": Mutant(
        "decode.verify:Rows.follow", "|= active", "|= False", *matched("deep", "penalty")
    ),
    "penalty writes into the sequence": Mutant(
        "decode.verify:Rows.__init__",
        "seen.clone()",
        "seen",
        "test_verify:test_a_verdict_leaves_the_sequence_as_it_was",
        {"rule": "match"},
    ),
    "penalty forgets what was emitted": Mutant(
        "decode.generation.loop:Loop._carry",
        "self.seen.scatter_(1,",
        "self.seen.clone().scatter_(1,",
        EXACT + "match_is_lossless_under_every_warper",
        {"warper": "penalty"},
    ),
    "greedy goes by a node's own row": Mutant(
        "decode.verify:match", "y.gather(1, draft.parents + 1)", "y[:, 1:]", *matched("deep", "greedy")
    ),
    "greedy forgets the path's penalty": Mutant(
        "decode.verify:Rows.best",
        "self._seen_at(draft)",
        "self._seen.repeat_interleave(self._logits.shape[1], 0)",
        "test_verify:test_the_best_token_of_a_slot_is_the_one_that_its_law_allows",
        {},
    ),
    # -- the rules, from the leaves
    "penalty forgets each slot's path": Mutant(
        "decode.verify:Rows._seen_at",
        "self._seen[:, None] | below",
        "self._seen[:, None].expand_as(below)",
        EXACT + "every_rule_is_lossless_under_every_warper",
        {"warper": "penalty", "path": "siblings, traversal"},
    ),
    "laws without their warpers": Mutant(
        "decode.verify:Rows.laws",
        "self._sampler.law(self._logits.flatten(0, 1), self._seen_at(draft))",
        "self._logits.flatten(0, 1).softmax(-1)",
        *drawn("block"),
    ),
    "the root may fail": Mutant(TRAVERSAL, "chance[:, -1] = 1.0", "chance[:, -1] = 0.5", *drawn("block")),
    "level after level, not leaf after leaf": Mutant(
        TRAVERSAL, "draft.leaf_first().argsort(-1)", "draft.levels.sort(-1, True).indices", *chosen("deep")
    ),
    "younger siblings first": Mutant(
        "decode.draft:Draft.leaf_first",
        "(order[:, None] < order)",
        "(order[:, None] > order)",
        *oracle("traversal", "without"),
    ),
    "slots stand though others stood before": Mutant(
        TRAVERSAL, "chance * failed", "chance", *oracle("traversal", "hybrid")
    ),
    "what is left of another slot": Mutant(
        TRAVERSAL, "law = left[row, end]", "law = left[row, 0]", *oracle("traversal", "hybrid")
    ),
    "failed chosen children come back": Mutant(
        TRAVERSAL, "(~node).to(law)", "torch.ones_like(node).to(law)", *oracle("traversal", "hybrid")
    ),
    "padding strikes token 0": Mutant(
        TRAVERSAL, " & (draft.tokens != PAD)", "", *oracle("traversal", "all chosen below")
    ),
    "the mass of elders is forgotten": Mutant(
        LEAVES, "1 - above * elders", "elders * 0 + 1", *chosen("siblings")
    ),
    "a chosen child stands as if its parent did": Mutant(
        LEAVES, "_ratio(above * mass,", "_ratio(mass,", *oracle("traversal", "hybrid")
    ),
    "a slot stands as if nothing below had failed": Mutant(
        LEAVES, "torch.where(kept < 1,", "torch.where(kept < 0,", *oracle("traversal", "hybrid")
    ),
    "a slot stands with what its children leave": Mutant(
        LEAVES, "_ratio(w * kept, w * kept + (1 - w))", "w * kept", *oracle("traversal", "hybrid")
    ),
    "a repeated chosen child takes mass again": Mutant(
        LEAVES, "fixed = fixed & ~(elder", "fixed = fixed | (elder", *chosen("twice")
    ),
    "deeper levels are taken for this one": Mutant(
        LEAVES, "== level + 1", ">= level + 1", *oracle("traversal", "hybrid")
    ),
    "laws of the level above": Mutant(LEAVES, "start += size", "start += 0", *oracle("traversal", "hybrid")),
    "s + 1 - w of chosen children": Mutant(
        LEAVES,
        "w * kept + (1 - w)",
        "w * kept + 1 - w",
        "test_verify:test_a_small_chance_to_fail_survives_single_precision",
        {"drawn": False},
    ),
    "s + 1 - w of drawn children": Mutant(
        FAIL,
        "mass + (1 - chance)",
        "mass + 1 - chance",
        "test_verify:test_a_small_chance_to_fail_survives_single_precision",
        {"drawn": True},
    ),
    "less than no chance": Mutant(
        LEAVES, ".clamp_min(0)\n    ", "\n    ", "test_verify:test_no_slot_has_less_than_no_chance", {}
    ),
    "a child stands as if its parent did": Mutant(
        FAIL, "_ratio(chance * law.gather", "_ratio(law.gather", *drawn("block")
    ),
    "a child stands more than surely": Mutant(FAIL, ".clamp_max(1)", "", *oracle("traversal", "without")),
    "the residual of p, not of w p": Mutant(FAIL, "chance[..., None] * law - q", "law - q", *drawn("block")),
    "p stays after a child has failed": Mutant(
        FAIL, "rest / mass[..., None], law)", "law, law)", *drawn("block")
    ),
    "w stays after a child has failed": Mutant(
        FAIL, "_ratio(mass, mass + (1 - chance))", "chance", *oracle("traversal", "without")
    ),
    "w after a failure is what is left": Mutant(
        FAIL, "_ratio(mass, mass + (1 - chance))", "mass", *drawn("block")
    ),
    "padding stands": Mutant(
        FAIL, "(laws.sampled & (draft.tokens != PAD))", "laws.sampled", PADDED, {"rule": "block"}
    ),
    "a chosen child stands by q": Mutant(
        FAIL,
        "(laws.sampled & (draft.tokens != PAD))",
        "(draft.tokens != PAD)",
        *oracle("traversal", "without"),
    ),
    "siblings out of order, from the leaves": Mutant(
        FAIL,
        "node = first(waiting)",
        "node = torch.where(waiting.any(-1), waiting.cumsum(-1).argmax(-1), -1)",
        *drawn("siblings, traversal"),
    ),
    "q is not struck, from the leaves": Mutant(
        FAIL, "q if laws.replacement else struck(q, at)", "q", *drawn("siblings, traversal")
    ),
    "q is struck though siblings repeat, from the leaves": Mutant(
        FAIL,
        "q if laws.replacement else struck(q, at)",
        "struck(q, at)",
        *oracle("traversal", "with replacement"),
    ),
    "the extra token at the end": Mutant(
        "decode.verify:settle",
        "accepted[:, None], extra",
        "torch.full_like(accepted, draft.depth)[:, None], extra",
        *oracle("traversal", "hybrid"),
    ),
    "the path below the slot that stands": Mutant(
        "decode.verify:settle",
        "draft.ancestors()[row, end]",
        "draft.ancestors()[row, :, end]",
        *oracle("traversal", "hybrid"),
    ),
    "a chain's laws belong to its nodes, not to their parents": Mutant(
        "decode.draft:Draft.chain", "parents + 1,", "parents + 2,", *TOKEN
    ),
    # -- lossy rules
    "entropy raises the threshold": Mutant(
        "decode.verify:lenient",
        ".sum(-1).neg().exp()",
        ".sum(-1).exp()",
        "test_verify:test_a_lenient_rule_keeps_the_longest_path_above_its_threshold",
        {"rule": "typical"},
    ),
    "the first path, not the longest": Mutant(
        "decode.verify:longest",
        "draft.levels.masked_fill(fails.any(-1), -1)",
        "(draft.levels > 0).int().masked_fill(fails.any(-1), -1)",
        "test_verify:test_a_lenient_rule_keeps_the_longest_path_above_its_threshold",
        {"rule": "threshold"},
    ),
    "a path is as good as its last token": Mutant(
        "decode.verify:longest",
        "draft.ancestors()[:, :, 1:] & ~good",
        "torch.eye(good.shape[1] + 1, dtype=torch.bool)[None, :, 1:] & ~good",
        "test_verify:test_a_lenient_rule_keeps_the_longest_path_above_its_threshold",
        {"rule": "threshold"},
    ),
    "padding is typical": Mutant(
        "decode.verify:lenient", " & (draft.tokens != PAD)", "", PADDED, {"rule": "typical"}
    ),
    # -- what is refused
    "chosen tokens pass for drawn ones": Mutant(
        "decode.verify:verify",
        "(rule.needs_laws and draft.laws is None)",
        "False",
        "test_verify:test_a_rule_for_drawn_chains_refuses_tokens_that_were_chosen",
        {"rule": "token"},
    ),
    "a tree passes for a chain": Mutant(
        "decode.verify:verify",
        "(rule.needs_chain and not draft.is_chain)",
        "False",
        "test_verify:test_a_rule_for_chains_refuses_a_tree",
        {"rule": "block"},
    ),
    "selected nodes pass": Mutant(
        "decode.verify:verify",
        "draft.laws.selected",
        "False",
        "test_verify:test_a_rule_that_reads_laws_refuses_nodes_selected_by_their_tokens",
        {"rule": "recursive"},
    ),
    "ranked nodes pass": Mutant(
        "decode.verify:verify",
        "draft.laws.ranked",
        "False",
        "test_verify:test_traversal_refuses_nodes_ranked_against_one_another",
        {},
    ),
    "ranked nodes are not marked": Mutant(
        GROWTH + ".draft",
        "not self.plan.tree",
        "False",
        "test_wrong_variants:test_what_ranks_tell_of_is_marked_so_that_traversal_refuses_it",
        {},
    ),
    "drawn nodes may be ranked": Mutant(
        "decode.plan:Plan.__post_init__",
        'self.proposal == "sampled" and self.width > 1 and not self.tree',
        "False",
        *refused("a drawn dynamic tree"),
    ),
    "ranked nodes may be traversed": Mutant(
        "decode.plan:Plan._check_rule",
        'self.rule == "traversal" and self.proposal == "hybrid"',
        "False",
        *refused("traversal of a dynamic hybrid"),
    ),
    "token takes a tree": Mutant(
        "decode.plan:Plan._check_rule",
        'self.forks or self.proposal != "sampled"',
        'self.proposal != "sampled"',
        *refused("token on a tree"),
    ),
    "block takes chosen nodes": Mutant(
        "decode.plan:Plan._check_rule",
        'self.forks or self.proposal != "sampled"',
        "self.forks",
        *refused("block on chosen nodes"),
    ),
    "a hybrid may be a chain": Mutant(
        "decode.plan:Plan.__post_init__",
        'self.proposal == "hybrid" and self.depth and self.width == 1',
        "False",
        *refused("a hybrid chain"),
    ),
    "chosen siblings may repeat": Mutant(
        "decode.plan:Plan.__post_init__",
        'self.replacement and not (self.proposal == "sampled" and self.tree)',
        "False",
        *refused("repeated siblings of a hybrid"),
    ),
    "a child may have no elder": Mutant(
        "decode.plan:Plan._fit_tree", " or elder not in known", "", *refused("a child without its elder")
    ),
    "token takes several drafts": Mutant(
        "decode.plan:Plan.forks",
        "self.width > 1 or self.drafts > 1",
        "self.width > 1",
        *refused("token on several drafts"),
    ),
    "lossy rules run unasked": Mutant(
        "decode.plan:Plan._choose_rule",
        "(self.rule in LOSSY) != self.lossy",
        "self.lossy and self.rule not in LOSSY",
        *refused("typical without consent"),
    ),
    # -- the coin
    "accept without strictness": Mutant(
        "decode.rng:KeyedCoin.flip",
        "< accept.double()",
        "<= accept.double()",
        "test_coin:test_no_flip_accepts_a_token_without_mass",
        {"value": 0.0},
    ),
    "a draw may have no weight": Mutant(
        "decode.rng:KeyedCoin.draw",
        "right=True",
        "right=False",
        "test_coin:test_no_draw_returns_a_token_without_weight",
        {"value": 0.0, "dtype": torch.float64},
    ),
    "a cumulative sum in fp32": Mutant(
        "decode.rng:KeyedCoin.draw",
        "weights.double().cumsum(-1)",
        "weights.cumsum(-1).double()",
        "test_coin:test_the_far_tail_of_a_large_vocabulary_is_reachable",
        {},
    ),
    "a key without the round": Mutant(
        DRAWS, "counter + slots if drawn else counter,", "counter + slots if drawn else zero,", SHARED, {}
    ),
    "a key without the round, by token": Mutant(
        DRAWS,
        "counter + slots if drawn else counter,",
        "counter + slots if drawn else zero,",
        *rounds("token"),
    ),
    "a key without the round, by block": Mutant(
        DRAWS,
        "counter + slots if drawn else counter,",
        "counter + slots if drawn else zero,",
        *rounds("block"),
    ),
    "draws of one place in two rounds agree, by block": Mutant(
        DRAWS,
        "counter + slots if drawn else counter,\n            zero if drawn else zero + slots,",
        "counter + slots,\n            zero,",
        *rounds("block"),
    ),
    "draws of one place in two rounds agree, by traversal": Mutant(
        DRAWS,
        "counter + slots if drawn else counter,\n            zero if drawn else zero + slots,",
        "counter + slots,\n            zero,",
        *rounds("traversal"),
    ),
    "the target's draws count rounds": Mutant(
        "decode.rng:KeyedCoin._turn_to", "self._position if page[0] else self._round", "self._round", *PLAIN
    ),
    "a key without the slot": Mutant(DRAWS, "zero if drawn else zero + slots", "zero", SHARED, {}),
    "blocks repeat their slots": Mutant(
        DRAWS, "np.arange(block * BLOCK, (block + 1) * BLOCK,", "np.arange(0, BLOCK,", SHARED, {}
    ),
    "a draw without its number": Mutant(DRAWS, "np.uint64(number)", "np.uint64(0)", SHARED, {}),
    "draws begin with their block": Mutant(
        "decode.rng:KeyedCoin._uniforms",
        "place : place + count",
        "0:count",
        "test_coin:test_a_draw_is_the_same_alone_and_among_many",
        {"purpose": Purpose.PROPOSE, "index": 0},
    ),
    "selected rows read what others made": Mutant(
        "decode.rng:KeyedCoin.select",
        "self._round[index], {})",
        "self._round[index], self._pages)",
        "test_coin:test_selected_rows_do_not_read_what_others_made",
        {},
    ),
    "a key without the purpose": Mutant(
        DRAWS, "np.array(purposes, np.uint64)[:, None]", "np.uint64(0)", SHARED, {}
    ),
    "the position does not count slots": Mutant(
        DRAWS, "counter + slots if drawn else counter,", "counter,", *PLAIN
    ),
    "select keeps the first rows' keys": Mutant(
        "decode.rng:KeyedCoin.select",
        "self._key[index]",
        "self._key[: len(index)]",
        "test_coin:test_select_then_at_keeps_each_rows_key",
        {},
    ),
    "position off by one": Mutant(
        "decode.generation.loop:Loop._settle",
        "np.array(self._accepted) + 1",
        "np.array(self._accepted)",
        *PLAIN,
    ),
    "rounds do not count": Mutant("decode.generation.loop:Loop._settle", "(0 if first else 1)", "0", *TOKEN),
    "53 bits are 52": Mutant(
        DRAWS,
        "words[1] >> np.uint64(11)",
        "words[1] >> np.uint64(12)",
        "test_coin:test_the_largest_word_is_below_one_and_53_bits_wide",
        {},
    ),
    # -- the loop
    "stale root": Mutant(
        "decode.generation.loop:Loop._carry",
        "verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]",
        "verdict.tokens[:, 0]",
        *TOLD,
    ),
    "taps of the first slots, not of the path": Mutant(
        "decode.generation.loop:Loop.round", "read.taps[row, path]", "read.taps[:, : path.shape[1]]", *TOLD
    ),
    "taps of rows that left": Mutant(
        "decode.generation.loop:Loop._carry",
        "taps[running], root[running]",
        "taps[: len(running)], root[running]",
        EXACT + "a_drafter_is_told_the_settled_tokens_and_their_own_taps",
        {"seed": 2, "stop": [3]},
    ),
    "the drafter keeps rows that left": Mutant(
        "decode.generation.loop:Loop._carry",
        "self.drafter.select(self.state, running)",
        "pass",
        EXACT + "a_drafter_is_told_the_settled_tokens_and_their_own_taps",
        {"seed": 2, "stop": [3]},
    ),
    "the end token is not trimmed before counting": Mutant(
        "decode.generation.loop:Loop._settle", "tokens[: end + 1], True", "tokens, True", *ENDS
    ),
    "only the last token may be an end": Mutant(
        "decode.generation.loop:Loop._settle",
        "for i, t in enumerate(tokens) if",
        "for i, t in [(0, tokens[0])] if",
        *STOPS,
    ),
    "stop strings of one row end another": Mutant(
        "decode.generation.loop:Loop._is_end",
        "self.ends[request]",
        "self.ends[0]",
        "test_stop:test_the_law_of_a_stopped_text_is_the_targets",
        {"drafter": FixedTrees(4), "plan": Plan(2, 2, 5), "strings": ["ab"]},
    ),
    "one token too many": Mutant(
        "decode.generation.generate:_limits",
        "limits.append(room)",
        "limits.append(room + 1)",
        EXACT + "no_more_tokens_are_emitted_than_were_asked_for",
        {"length": 2},
    ),
    "the context's end is ignored": Mutant(
        "decode.generation.generate:_limits",
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
        "decode.sampling:Sampler._penalised",
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
        "drafters.families.recurrent:Recurrent.advance",
        "tokens.roll(-1, 1).scatter(1, end, root[:, None])",
        "tokens",
        FACES,
        EAGLE,
    ),
    "the last pair wraps around": Mutant(
        "drafters.families.recurrent:Recurrent.advance", ".scatter(1, end, root[:, None])", "", FACES, EAGLE
    ),
    "features of wrong rows": Mutant(
        "drafters.families.recurrent:Recurrent.advance",
        "self.fuse(taps)",
        "self.fuse(taps.roll(1, 1))",
        FACES,
        EAGLE,
    ),
    "stale drafter cache": Mutant(
        "drafters.families.recurrent:Recurrent.advance", "state.store.keep(counts)", "pass", FACES, EAGLE
    ),
    "the prediction at the padding": Mutant(
        "drafters.families.recurrent:Recurrent.advance",
        "x.gather(1, end[..., None].expand(-1, -1, x.shape[-1]))",
        "x[:, -1:]",
        FACES,
        EAGLE,
    ),
    "a level overwrites the one above": Mutant(
        "decode.model.cache:RowStore.begin",
        "self._new, self._scratch = new, scratch",
        "self._new, self._scratch = new, 0",
        FACES,
        EAGLE,
    ),
    "a level sees its cousins": Mutant(
        "drafters.layers.decoder_layer:descend",
        "own = torch.eye(width, dtype=torch.bool, device=parent.device)",
        "own = torch.ones(width, width, dtype=torch.bool)",
        LEVELS,
        EAGLE,
    ),
    "a child of the wrong beam": Mutant(
        "drafters.layers.decoder_layer:descend",
        "reach.gather(1, parent[..., None].expand(-1, -1, reach.shape[-1]))",
        "reach.expand(-1, width, -1)",
        LEVELS,
        EAGLE,
    ),
    "a child of another's feature": Mutant(
        "drafters.families.recurrent:Recurrent.propose",
        "feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))",
        "feature.expand(-1, parent.shape[1], -1)",
        LEVELS,
        EAGLE,
    ),
    "positions are slots in a drafter's tree": Mutant(
        "drafters.families.recurrent:Recurrent.read_pairs",
        "block.sum(-1) - 1",
        "block.shape[2] - block.shape[1] + torch.arange(block.shape[1])",
        LEVELS,
        EAGLE,
    ),
    "a draft model reads the root twice": Mutant(
        "drafters.models.lm:DraftLM.advance",
        "tokens[:, 1:], [n - 1 for n in counts]",
        "tokens, counts",
        FACES,
        LM,
    ),
    "a draft model forgets the root": Mutant(
        "drafters.models.lm:DraftLM.advance", "[n + 1 for n in counts]", "list(counts)", FACES, LM
    ),
    "a draft model's prediction at the padding": Mutant(
        "drafters.models.lm:DraftLM.advance",
        "last.gather(1, end[..., None].expand(-1, -1, last.shape[-1]))[:, 0]",
        "last[:, -1]",
        FACES,
        LM,
    ),
    "a draft model writes over its draft": Mutant(
        "drafters.models.lm:DraftLM.propose", "read += width", "read += 0", FACES, LM
    ),
    "a draft model's selected rows are the first": Mutant(
        "drafters.models.lm:DraftLM.select",
        "state.logits[list(rows)]",
        "state.logits[: len(rows)]",
        "test_drafters:test_select_keeps_these_rows_in_this_order",
        LM | {"rows": [2, 0]},
    ),
    "a draft model is taught a row early": Mutant(
        "drafters.models.lm:DraftLM.unroll", "last[row, t + 1]", "last[row, t]", FACES, LM
    ),
    "a draft model is taught past its answer": Mutant(
        "drafters.models.lm:DraftLM.unroll",
        "supervised(batch.loss_mask, 1)",
        "batch.loss_mask.roll(-1, 1)",
        GOLDEN,
        LM | {"mask": "turns"},
    ),
    "an on-policy answer ends before the token that loses the target": Mutant(
        "distill.data.on_policy:reached",
        "[accepted.new_ones(1), accepted[:-1]]",
        "[accepted]",
        "test_on_policy:test_an_answer_ends_after_the_token_that_loses_the_target",
        {},
    ),
    "the unroll does not move on": Mutant(
        "drafters.families.recurrent:Recurrent.unroll",
        "times[slots] + (depth - 1)",
        "times[slots]",
        FACES,
        EAGLE,
    ),
    "the unroll's tokens do not move on": Mutant(
        "drafters.families.recurrent:Recurrent.unroll",
        "drafted_share(shares, slots + (depth - 1))",
        "drafted_share(shares, slots)",
        FACES,
        EAGLE,
    ),
    "an anchor forgets its own steps": Mutant(
        "drafters.layers.unroll_attention:_Attention.forward",
        "(own)[..., i, None]",
        "(own)[..., 0, None]",
        FACES,
        EAGLE,
    ),
    "teacher row off by one": Mutant(
        "drafters.families.recurrent:Recurrent.unroll",
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
    "an unrolled query sees past itself": Mutant(
        "drafters.layers.unroll_attention:_Heads._mask",
        "> place[:, None]",
        "> 1 + place[:, None]",
        DENSE,
        PLAINLY,
    ),
    "a block's queries see what its first sees": Mutant(
        "drafters.layers.unroll_attention:blocks", "seen[last - 1] + 1,", "seen[first] + 1,", DENSE, PLAINLY
    ),
    "one text's keys are another's": Mutant(
        "drafters.layers.unroll:Route.__init__",
        "(sizes.cumsum(0) - sizes)",
        "(0 * sizes)",
        DENSE,
        PLAINLY,
    ),
    "keys of anchors that left stay in the row": Mutant(
        "drafters.layers.unroll:Walk._look",
        "torch.searchsorted(self._route.anchors[d - 1], now)",
        "torch.arange(len(now))",
        DENSE,
        PLAINLY,
    ),
    "features of anchors that left stay in the row": Mutant(
        "drafters.layers.unroll:Walk.kept",
        "torch.searchsorted(before, now)",
        "torch.arange(len(now))",
        DENSE,
        PLAINLY,
    ),
    "positions without an anchor ask as well": Mutant(
        "drafters.layers.unroll:Walk.step",
        "x = x.index_select(0, asking)",
        "x = x[: len(asking)]",
        DENSE,
        PLAINLY,
    ),
    "a key is read by one query head": Mutant(
        "drafters.layers.unroll_attention:_Heads.to_own", ".sum(2)", "[:, :, 0]", DENSE, PLAINLY
    ),
    "no gradient into a step's own key": Mutant(
        "drafters.layers.unroll_attention:_Attention.backward",
        "slopes[..., i, None] * heads.queries",
        "0 * slopes[..., i, None] * heads.queries",
        DENSE,
        PLAINLY,
    ),
    "a turn's gradient is turned on, not back": Mutant(
        "drafters.layers.fused_backward:_Rotate.backward", "sign=-1", "sign=1", DENSE, PLAINLY
    ),
    "the norm's gradient forgets its length": Mutant(
        "drafters.layers.fused_backward:_RMSNorm.backward", "value=-1", "value=0", DENSE, PLAINLY
    ),
    "the gate's gradient is the product's": Mutant(
        "drafters.layers.fused_backward:_SwiGLU.backward", "grad * up, gate", "grad, gate", DENSE, PLAINLY
    ),
    "the embedding is not normalised": Mutant(
        "drafters.models.eagle3:Eagle3.token_share", "F.linear(unit,", "F.linear(embedded,", FACES, EAGLE3
    ),
    "the feature fed back has passed the norm": Mutant(
        "drafters.models.eagle3:Eagle3.emit",
        "hidden if self.norm_output else x",
        "hidden",
        DENSE,
        PLAINLY,
    ),
    "the residual is the plain feature": Mutant(
        "drafters.models.eagle3:Eagle3.first_input",
        "normed if self.norm_before_residual else feature",
        "feature",
        DENSE,
        PATCHY | {"name": "norm_before_residual"},
    ),
    "a draft id is taken for the target's": Mutant(
        "drafters.drafting.vocabulary:names",
        "vocabulary.ids[token]",
        "token",
        "test_drafters:test_a_chosen_chain_holds_the_likeliest_token_of_every_law",
        EAGLE3,
    ),
    "a draft law is taken for one over the target's vocabulary": Mutant(
        "drafters.drafting.vocabulary:law_of",
        ".index_copy_(1, vocabulary.ids, law)",
        ".index_copy_(1, vocabulary.ids.argsort(), law)",
        FACES,
        EAGLE3,
    ),
    "end tokens are counted like others": Mutant(
        "drafters.drafting.vocabulary:frequent",
        "rank[list(first)]",
        "rank[[]]",
        "test_eagle3:test_the_vocabulary_is_what_the_target_wrote_most_and_its_end_tokens",
        {},
    ),
    "the prompt is counted": Mutant(
        "drafters.models.eagle3:Eagle3.fit",
        "torch.tensor(text.tokens)[torch.tensor(text.loss_mask, dtype=torch.bool)]",
        "torch.tensor(text.tokens)",
        "test_eagle3:test_the_vocabulary_is_what_the_target_wrote_most_and_its_end_tokens",
        {},
    ),
    "a mask sees the masks behind it": Mutant(
        "drafters.models.p_eagle:PEagle._states", ".tril()", "", FACES, {"drafter_name": "p_eagle"}
    ),
    "a mask's token is not normalised": Mutant(
        "drafters.models.p_eagle:PEagle.drafted_share",
        "first.input_layernorm(self.mask_token[None])",
        "self.mask_token[None]",
        FACES,
        {"drafter_name": "p_eagle"},
    ),
    "the feature goes on behind the first mask": Mutant(
        "drafters.models.p_eagle:PEagle.emit",
        "self.mask_hidden.to(x.dtype).expand_as(x)",
        "x",
        "test_variants:test_an_unroll_with_masks_is_one_causal_pass",
        {"layers": 1},
    ),
    "a draft's steps all use the first module": Mutant(
        "drafters.families.recurrent:Recurrent.propose",
        "self.at(depth)",
        "self",
        FACES,
        {"drafter_name": "prism"},
    ),
    "an unroll's steps all use the first module": Mutant(
        "drafters.families.recurrent:Recurrent.unroll", "(now := self.at(depth))", "(now := self)", *MODULES
    ),
    "a module reads the tokens as the one before does": Mutant(
        "drafters.families.recurrent:Recurrent.unroll", "part, shares = now,", "part, _ = now,", *MODULES
    ),
    "a module's fusion without its layer": Mutant(
        "drafters.families.recurrent:Recurrent.unroll", "walk.hand_over(part.stack,", "(part.stack,", *MODULES
    ),
    "all modules but the first go on from nothing": Mutant(
        "drafters.checkpoint.io:warm_start",
        "found = drafter.adopt(found)",
        "pass",
        "test_variants:test_every_module_goes_on_from_an_eagle",
        {},
    ),
    "the selected features are the first": Mutant(
        "drafters.families.recurrent:Recurrent.select",
        "state.newest[list(rows)]",
        "state.newest[: len(rows)]",
        "test_drafters:test_select_keeps_these_rows_in_this_order",
        EAGLE | {"rows": [2, 0]},
    ),
    "q at another temperature": Mutant(
        "drafters.drafting.chain:chain",
        "coin.draw(law,",
        "coin.draw(logits.softmax(-1),",
        EXACT + "token_with_a_drafter_is_lossless",
        EAGLE | {"sampler": Sampler(0.5)},
    ),
    "q of the sampler's defaults": Mutant(
        "drafters.drafting.tree:expand",
        "Sampler(temperature,",
        "Sampler(1.0,",
        "test_drafters:test_a_sampled_chains_laws_are_warped_as_the_sampler_says",
        EAGLE,
    ),
    "the drafter's law is penalised without its history": Mutant(
        "drafters.drafting.tree:expand",
        "warp = Sampler(temperature, sampler.top_k, sampler.top_p, sampler.min_p)",
        "warp = sampler",
        "test_expand:test_drawn_laws_ignore_the_repetition_penalty",
        {"plan": Plan(2, proposal="sampled")},
    ),
    "a hybrid draws where nothing can be drawn": Mutant(
        "decode.plan:Plan.draws_at",
        '(self.proposal == "hybrid" and not own)',
        "False",
        "test_expand:test_a_hybrid_at_temperature_zero_is_the_fixed_tree",
        {"plan": Plan(2, 3, 6, proposal="hybrid")},
    ),
    "one key for every drafted token": Mutant(
        "drafters.drafting.chain:chain",
        "Key(Purpose.PROPOSE, level)",
        "Key(Purpose.PROPOSE, 0)",
        EXACT + "token_with_a_drafter_is_lossless",
        EAGLE | {"sampler": Sampler(0.5)},
    ),
    "an unlikely drawn token is discarded": Mutant(
        "drafters.drafting.chain:chain",
        "token.masked_fill(~going, PAD)",
        "token.masked_fill(law.gather(1, token[:, None])[:, 0] < plan.min_confidence, PAD)",
        *drawn("confident chain, token"),
    ),
    "an unlikely drawn token is discarded, by block": Mutant(
        "drafters.drafting.chain:chain",
        "token.masked_fill(~going, PAD)",
        "token.masked_fill(law.gather(1, token[:, None])[:, 0] < plan.min_confidence, PAD)",
        *drawn("confident chain, block"),
    ),
    "a level is confident alone": Mutant(
        "drafters.drafting.chain:chain", "sure = sure * _largest", "sure = _largest", *UNSURE
    ),
    "the head is not asked": Mutant(
        "drafters.drafting.chain:chain", "confidence is not None", "False", *SURE, EAGLE
    ),
    "the head is asked of the root's state": Mutant(
        "drafters.families.recurrent:Recurrent.propose",
        "hidden, feature = self.emit(read(",
        "_, feature = self.emit(read(",
        *SURE,
        EAGLE,
    ),
    "the head is asked of the next depth's state": Mutant(
        "drafters.families.token_bias:Levels.newest", "self._depth - 1", "-1", *SURE, MEDUSA
    ),
    "what the head learns moves the drafter": Mutant(
        "drafters.base:Confidence.forward",
        ".detach()",
        "",
        "test_confidence:test_teaching_a_head_reaches_no_other_weight",
        EAGLE | {"weighting": constant},
    ),
    "all rows teach the head alike": Mutant(
        "distill.losses.objective:Objective.__call__",
        "(weights[i] * entropy)",
        "entropy",
        "test_confidence:test_rows_count_by_their_weights_and_columns_of_a_side_are_not_read",
        {},
    ),
    "a checkpoint forgets its head": Mutant(
        "drafters.checkpoint.io:load",
        "if saved.confidence:",
        "if False:",
        "test_confidence:test_a_head_comes_back_with_its_drafter",
        EAGLE,
    ),
    "the temperature of drafts is the target's": Mutant(
        "decode.plan:Plan.draws_at",
        "temperature if self.draft_temperature is None else self.draft_temperature",
        "temperature",
        "test_expand:test_drafts_are_drawn_at_their_own_temperature",
        {"plan": Plan(3, proposal="sampled", draft_temperature=0.6)},
    ),
    "one key for every level of drafts": Mutant(
        SIDE, "Key(Purpose.PROPOSE, level * count)", "Key(Purpose.PROPOSE, 0)", *drawn("two drafts")
    ),
    "drafts drawn with replacement, told to be without": Mutant(
        SIDE, "replacement=True", "replacement=False", *drawn("two drafts")
    ),
    "a draft's law is that of another": Mutant(
        SIDE,
        "owners.append(torch.where(twin == own,",
        "owners.append(torch.where(twin != own,",
        *drawn("two drafts"),
    ),
    "drafts hang from others that begin otherwise": Mutant(
        SIDE, "(twin[:, :, None] == twin[:, None]) & ", "", *SHARE
    ),
    "drafts hang from the last of their twins": Mutant(
        SIDE, "alike.int().argmax(-1)", "count - 1 - alike.int().flip(-1).argmax(-1)", *SHARE
    ),
    "drafts grow from the first alone": Mutant(
        SIDE, "step(tokens[-1].clamp_min(0), twin)", "step(tokens[-1], 0 * twin)", *SHARE
    ),
    "the selected draft is weighed by min(1, p / q)": Mutant(
        "decode.verify:select",
        "match(replace(draft, tokens=draft.tokens.masked_fill(~best, PAD), laws=None)",
        "recursive(replace(draft, tokens=draft.tokens.masked_fill(~best, PAD))",
        *drawn("two drafts, selected"),
    ),
    "all drafts but the best are kept": Mutant(
        "decode.verify:select", "masked_fill(~best, PAD)", "masked_fill(best, PAD)", *SELECT
    ),
    "a draft is as good as its last token": Mutant(
        "decode.verify:most_expected", "score.argmax(-1)", "mass[:, 0].argmax(-1)", *SELECT
    ),
    "a draft is as good as it is likely": Mutant(
        "decode.verify:most_expected", "score.argmax(-1)", "reached[..., 0].argmax(-1)", *SELECT
    ),
    "padding is the best draft": Mutant(
        "decode.verify:most_expected", "mass.masked_fill(draft.tokens == PAD, 0.0)", "mass", *SELECT
    ),
    "one key for every level": Mutant(
        GROWTH + "._draw",
        "Key(Purpose.PROPOSE, first, number)",
        "Key(Purpose.PROPOSE, 0, number)",
        *drawn("siblings"),
    ),
    "one key for all drawn siblings": Mutant(
        GROWTH + "._draw",
        "Key(Purpose.PROPOSE, first, number)",
        "Key(Purpose.PROPOSE, first)",
        *drawn("siblings"),
    ),
    "siblings drawn with replacement, told to be without": Mutant(
        GROWTH + "._draw", "law.scatter(-1, token[..., None], 0.0)", "law", *drawn("siblings")
    ),
    "siblings drawn without replacement, told to be with": Mutant(
        GROWTH + "._draw", " and not self.plan.replacement", "", *form("repeated")
    ),
    "nothing left is token 0": Mutant(
        GROWTH + "._draw", "torch.where(some, token, PAD)", "token", ABSENT, {"proposal": "sampled"}
    ),
    "the likeliest may be drawn too": Mutant(
        GROWTH + "._one_drawn", "chosen.masked_fill(own, 0.0)", "chosen", *TRANSPORT
    ),
    "a token nobody chose cannot be drawn": Mutant(
        GROWTH + "._one_drawn", "[:, None] - 1 >", "[:, None] >", *form("hybrid")
    ),
    "the drawn child comes last": Mutant(
        GROWTH + "._one_drawn",
        "torch.cat([drawn, token], -1), torch.cat([mass, chosen], -1)",
        "torch.cat([token, drawn], -1), torch.cat([chosen, mass], -1)",
        *drawn("dynamic hybrid"),
    ),
    "the mass of the rest is forgotten": Mutant(
        GROWTH + "._one_drawn",
        "torch.cat([mass, chosen]",
        "torch.cat([torch.ones_like(mass), chosen]",
        *HYBRID,
    ),
    "a drawn child is ranked by its own probability": Mutant(
        GROWTH + "._one_drawn",
        "torch.cat([mass, chosen]",
        "torch.cat([law.gather(-1, drawn), chosen]",
        *RANKED,
    ),
    "a drawn child decides about itself": Mutant(
        GROWTH + "._one_drawn",
        "torch.cat([mass, chosen]",
        "torch.cat([law.gather(-1, drawn), chosen]",
        "test_expand:test_what_is_drawn_decides_nothing_about_itself",
        {"shape": (3, 3, 7)},
    ),
    "only the first sibling is drawn": Mutant(
        GROWTH + ".draft", "(rank < self.drawn)", "(rank < 1)", *laws(Plan(tree=FORKED, proposal="sampled"))
    ),
    "all but one child are chosen": Mutant(
        GROWTH + ".drawn", "return 1 if", "return 2 if", *drawn("dynamic hybrid")
    ),
    "a beam's parent is another beam": Mutant(DYNAMIC, "best // width", "best // (width + 1)", *BEST),
    "a path's score is its last token's": Mutant(DYNAMIC, "score[..., None] + gain", "gain", *BEST),
    "a beam is counted within its level": Mutant(DYNAMIC, "best + (total + 1)", "best + 1", *BEST),
    "a dropped slot's law is the root's": Mutant(
        DYNAMIC,
        "slot[:, 1:].masked_fill_(slot[:, 1:] == 0, -1)",
        "pass",
        *laws(Plan(3, 3, 4, proposal="hybrid")),
    ),
    "laws of beams, not of their slots": Mutant(
        DYNAMIC, "kept % width, slot", "kept % width, slot.roll(1, 1)", *RANKED
    ),
    "a child's rank is its parent's": Mutant(DYNAMIC, "kept % width", "kept // width", *RANKED),
    "a child without mass is kept": Mutant(
        DYNAMIC,
        "token.masked_fill(score == -torch.inf, PAD)",
        "token",
        "test_expand:test_of_equal_scores_the_older_node_is_kept",
        {},
    ),
    "of equal scores the younger": Mutant(
        "drafters.drafting.tree:_best",
        "score.sort(dim=-1, descending=True, stable=True)",
        "[a.flip(-1) for a in score.sort(dim=-1, stable=True)]",
        "test_expand:test_of_equal_scores_the_older_node_is_kept",
        {},
    ),
    "of equal scores any": Mutant(
        "drafters.drafting.tree:_best",
        "score.sort(dim=-1, descending=True, stable=True)",
        "score.topk(score.shape[-1])",
        "test_expand:test_of_equal_scores_the_older_node_is_kept",
        {},
    ),
    "a static child of the wrong parent": Mutant(
        STATIC,
        "level.entry.expand(rows, -1)",
        "torch.zeros_like(level.entry).expand(rows, -1)",
        *form("fixed"),
    ),
    "a static slot is its node": Mutant(
        FORM,
        "place[path] + 1 for path in owners",
        "place[path] for path in owners",
        *laws(Plan(tree=FORKED, proposal="sampled")),
    ),
    "a static child is another's": Mutant(
        FORM, "* max(fans) + path[-1]", "* min(fans) + path[-1]", *form("fixed")
    ),
    "children beyond a node's own number": Mutant(
        FORM, "sum(path[:-1] == up for path in tree)", "3", *form("hybrid")
    ),
    # -- the loss
    "a teacher renormalised on the draft's tokens": Mutant(
        "distill.losses.chunked_logits:Law.__init__",
        "self.log_p.exp()",
        "self.log_p.softmax(-1)",
        "test_objectives:test_a_token_outside_the_draft_vocabulary_is_a_miss",
        {},
    ),
    "the target's likeliest token in the draft's numbers": Mutant(
        "distill.losses.chunked_logits:Law.__init__",
        "self._draft_ids(best)",
        "best",
        *weighted("tv", "reduced"),
    ),
    "the teacher's row one too early": Mutant(
        "distill.losses.chunked_logits:Sweep.__iter__",
        "step.anchor + step.depth)",
        "step.anchor + step.depth - 1)",
        *weighted("kl", "full"),
    ),
    "depths share the first one's rows": Mutant(
        "distill.losses.chunked_logits:Sweep.__iter__",
        "self._where(place[rows] - start)",
        "slice(0, rows.stop - rows.start)",
        *weighted("kl", "full"),
    ),
    "a teacher's mass of 1": Mutant(
        "distill.losses.divergences:kl", "if teacher.whole", "if True", *differentiated("kl")
    ),
    "total variation upside down": Mutant(
        "distill.losses.divergences:tv",
        "student.q.mul_(mass).sub_(below)",
        "below.sub_(student.q.mul_(mass))",
        *differentiated("tv"),
    ),
    "total variation without its softmax": Mutant(
        "distill.losses.divergences:tv", "student.q.mul_(mass).sub_(below)", "-below", *differentiated("tv")
    ),
    "likelihood of acceptance without its alpha": Mutant(
        "distill.losses.divergences:lk",
        "least.add_(value[:, None]).exp_()",
        "least.exp_()",
        *differentiated("lk"),
    ),
    "reverse KL without a floor": Mutant(
        "distill.losses.divergences:ReverseKL.__call__",
        "teacher.log_p.clamp_min(math.log(self.floor))",
        "teacher.log_p",
        "test_divergences:test_reverse_kl_takes_no_probability_below_its_floor",
        {},
    ),
    "misses are free": Mutant(
        "distill.losses.divergences:JSD.__call__",
        " - beta * math.log(beta) * (1 - teacher.mass)",
        "",
        "test_divergences:test_jensen_shannon_is_bounded_and_a_miss_costs_its_share",
        {},
    ),
    "a missed top token is the draft's first": Mutant(
        "distill.losses.divergences:TopK.__call__", "p * (ids >= 0)", "p", *differentiated("topk")
    ),
    "no slope behind the linear map": Mutant(
        "distill.losses.objective:_Chunked.forward",
        "if behind is not None:",
        "if False:",
        *differentiated("kl"),
    ),
    "a head's gradient without weights": Mutant(
        "distill.losses.objective:_add_product",
        "(states * weight)",
        "states",
        *differentiated("kl", heads="own"),
    ),
    "a head weighted before the alphas are known": Mutant(
        "distill.losses.objective:_Chunked.forward",
        "if late and learned:",
        "if False:",
        *differentiated("kl", "streak", "shared"),
    ),
    "alphas aligned by rank, not by anchor": Mutant(
        "distill.losses.objective:_table",
        "torch.searchsorted(anchors, step.anchor)",
        "torch.arange(len(step.anchor))",
        *differentiated("kl", "streak"),
    ),
    "streak counts its own alpha": Mutant(
        "distill.losses.weights:Streak._weigh",
        "_before(alpha) * _after(alpha)",
        "_before(alpha) * alpha * _after(alpha)",
        "test_weighting:test_streak_and_dpace_are_the_gradient_of_the_expected_accepted_length",
        {"name": "tv with streak"},
    ),
    "smoothing brings anchors back that have left": Mutant(
        "distill.losses.weights:RowWeights.__call__",
        "(alpha * (1 - s) + s) * present",
        "alpha * present * (1 - s) + s",
        *differentiated("kl", "dpace"),
    ),
    # -- files
    # -- heads on the newest feature, and recurrent cells
    "a head of the depth above": Mutant(
        "drafters.layers.lm_heads:OwnHeads.of",
        "{depth - 1}",
        "{max(depth - 2, 0)}",
        "test_medusa:test_what_the_targets_family_puts_behind_its_head_stays",
        {},
    ),
    "heads in decoding are one": Mutant(
        "drafters.models.medusa:Medusa.propose", "heads.of(j, target)", "heads.of(1, target)", FACES, MEDUSA
    ),
    "an own head forgets the target's soft cap": Mutant(
        "drafters.layers.lm_heads:OwnHeads.of",
        "replace(target.head, weight=",
        "type(target.head)(weight=",
        "test_medusa:test_what_the_targets_family_puts_behind_its_head_stays",
        {},
    ),
    "own heads begin at random": Mutant(
        "drafters.layers.lm_heads:OwnHeads.begin",
        "weight.copy_(target.head.weight)",
        "weight.normal_()",
        "test_medusa:test_a_fresh_drafter_says_at_every_depth_what_the_target_says_next",
        {"form": {"own_head": True, "layers": 1}},
    ),
    "a medusa head answers one token early": Mutant(
        "drafters.models.medusa:Medusa._unroll",
        "DraftStep(hidden, anchor, depth,",
        "DraftStep(hidden, anchor + 1, depth,",
        GOLDEN,
        MEDUSA | {"mask": "all"},
    ),
    "a tuned target's row is taught as the one before": Mutant(
        "drafters.models.medusa:Medusa2.unroll",
        "batch.loss_mask[:, 1:], (0, 1)",
        "batch.loss_mask[:, :-1], (0, 1)",
        GOLDEN,
        MEDUSA2 | {"mask": "answer"},
    ),
    "the heads' loss has its weight on the target's own": Mutant(
        "drafters.models.medusa:Medusa2.unroll",
        "step._replace(weight=self.heads)",
        "step",
        "test_medusa2:test_depth_zero_is_the_tuned_targets_own_law_taught_by_the_original",
        {},
    ),
    "a tuned target learns from the first step": Mutant(
        "drafters.models.medusa:Medusa2._lora_rate",
        "done / self.warmup - 1",
        "done / self.warmup",
        "test_medusa2:test_heads_learn_alone_at_first_and_faster_than_the_target_after",
        {},
    ),
    "a draft that reads the tuned target is verified by the original": Mutant(
        "drafters.models.medusa:Medusa2.verifier", "self.lora.merge(target)", "target", FACES, MEDUSA2
    ),
    "merged weights count the product once": Mutant(
        "drafters.families.tuned_target:Lora.merge",
        "self.alpha / self.r",
        "1.0",
        "test_medusa2:test_merged_and_unmerged_are_one_model",
        {"targets": "all-linear"},
    ),
    "what is tuned are the target's own layers": Mutant(
        "drafters.families.tuned_target:Lora.merge",
        "id(weight) for weight in target.layers.parameters()",
        "0",
        "test_medusa2:test_layers_of_the_tuned_target_share_no_memory_with_the_original",
        {},
    ),
    "a tuned target is taken for the original": Mutant(
        "drafters.families.tuned_target:Lora._digest",
        "digest.update(weight.float().cpu().contiguous().numpy().tobytes())",
        "pass",
        "test_medusa2:test_the_tuned_target_has_a_fingerprint_of_its_own",
        {},
    ),
    "how far a target moved is measured one row late": Mutant(
        "distill.scoring.target_drift:_laws",
        "len(prompt) - 1 :",
        "len(prompt) :",
        "test_medusa2:test_how_far_it_moved_is_the_mean_over_the_originals_answers",
        {},
    ),
    "depth 0 counts as a depth that drafts": Mutant(
        "distill.losses.objective:_drafts",
        "step.depth and not step.aside",
        "not step.aside",
        "test_medusa2:test_the_loss_is_the_targets_own_and_the_heads_times_their_weight",
        {"weights": Streak(1.0, 0.0)},
    ),
    "every level of a product begins anew": Mutant(
        "drafters.families.token_bias:Levels.step",
        "self._raw[k][:, None]",
        "self._raw[0][:, None]",
        LEVELS,
        {"drafter_name": "hf_dllm"},
    ),
    "the newest feature is that of the padding": Mutant(
        "drafters.families.feature_heads:NewestDrafter.advance", "end, 0]", "-1, 0]", FACES, MEDUSA
    ),
    "rows keep the feature of others": Mutant(
        "drafters.families.feature_heads:NewestDrafter.select",
        "state.feature[list(rows)]",
        "state.feature[: len(rows)]",
        "test_drafters:test_select_keeps_these_rows_in_this_order",
        MEDUSA | {"rows": [2, 0]},
    ),
    "rows keep the root of others": Mutant(
        "drafters.families.feature_heads:NewestDrafter.select",
        "state.root[list(rows)]",
        "state.root[: len(rows)]",
        "test_drafters:test_select_keeps_these_rows_in_this_order",
        MLP | {"rows": [2, 0]},
    ),
    "a cell reads the token after": Mutant(
        "drafters.families.feature_heads:Chained.unroll",
        "tokens[anchor + depth]",
        "tokens[anchor + depth - 1]",
        FACES,
        MLP,
    ),
    "anchors leave but their states stay": Mutant(
        "drafters.families.feature_heads:Chained.unroll",
        "anchor, state = anchor[stay], state[stay]",
        "anchor, state = anchor[stay], state[: stay.sum()]",
        FACES,
        LSTM,
    ),
    "a level's states are not its parents'": Mutant(
        "drafters.families.feature_heads:Chained.propose",
        "parent[..., None]",
        "torch.zeros_like(parent)[..., None]",
        LEVELS,
        MLP,
    ),
    "a level is computed as the first": Mutant(
        "drafters.families.feature_heads:Chained.propose",
        "depth += 1",
        "depth = 1",
        "test_mlp:test_both_faces_agree_in_every_form",
        {"kind": Mlp, "options": {"tie_weights": False, "scale_input": False, "inner_size": 24}},
    ),
    "a memory cell is dropped": Mutant(
        "drafters.models.mlp:Lstm.cell",
        "memory * forget + ",
        "",
        "test_mlp:test_every_law_is_that_of_the_formula",
        {"kind": Lstm, "options": {"scale_input": True, "inner_size": 0}},
    ),
    "a hydra head reads its newest token alone": Mutant(
        "drafters.models.hydra:Hydra.cell",
        "torch.cat([state, target.embed(token).to(state.dtype)], -1)",
        "torch.cat([state[..., : target.hidden_size], *[target.embed(token)] * (index + 1)], -1)",
        "test_hydra:test_the_children_of_a_node_depend_on_its_whole_path",
        {},
    ),
    "a hydra head has the head of another depth": Mutant(
        "drafters.models.hydra:Hydra.output", "of(depth, target)", "of(1, target)", *FORMULA
    ),
    # -- masks filled in by a whole model
    "a token is read off its own mask, shift or not": Mutant(
        "drafters.families.masked_lm:MaskedModel.read", "window.masks - self.shift", "window.masks", *PASS
    ),
    "the root is hidden behind a mask": Mutant(
        "drafters.families.masked_lm:MaskedModel.window", "place >= size", "place >= size - 1", *PASS
    ),
    "a causal model stays one": Mutant(
        "drafters.families.masked_lm:MaskedModel.inputs",
        '"attention_mask": bias[:, None, None].expand(-1, -1, width, -1),',
        '"attention_mask": bias[:, None, None].expand(-1, -1, width, -1) + torch.full((width, width), '
        "torch.finfo(bias.dtype).min).triu(1),",
        *PASS,
    ),
    "padding is shown": Mutant(
        "drafters.families.masked_lm:MaskedModel.inputs",
        "bias.masked_fill(~window.seen",
        "bias.masked_fill(~True",
        *SEEN,
    ),
    "a window is the text's beginning": Mutant(
        "drafters.families.masked_lm:MaskedModel.window",
        "end - size + place",
        "place + 0 * end",
        "test_dllm:test_of_a_long_text_it_reads_what_there_is_room_for",
        {"kind": "llama"},
    ),
    "a window shows a token of the draft": Mutant(
        "drafters.models.hf_dllm:Dllm.unroll", "anchor % length + 2", "anchor % length + 3", FACES, DLLM
    ),
    "masks are as many as the plan is deep": Mutant(
        "drafters.models.hf_dllm:Dllm.propose",
        "masked = [len(history.tokens) for history in state], self.masked",
        "masked = [len(history.tokens) for history in state], self.masked; masked.masks = plan.depth",
        "test_dllm:test_a_draft_costs_one_pass_however_deep",
        {"depth": 5},
    ),
    "a sample counts for itself": Mutant(
        "drafters.models.hf_dllm:Dllm.unroll", "len(every) / len(anchor)", "1.0", *SAMPLE
    ),
    "a sample is of the first anchors": Mutant(
        "drafters.base:some_of", "chosen.sort().values", "chosen.sort().indices", *SAMPLE
    ),
    "a sample is drawn by torch's own dice": Mutant(
        "drafters.base:some_of", ", generator=torch.Generator().manual_seed(seed)", "", *SAMPLE
    ),
    "the masks that it is least sure of are filled": Mutant(
        "drafters.models.hf_dllm:Dllm._denoise",
        "chance.masked_fill(~left, -1)",
        "(-chance).masked_fill(~left, -9)",
        *STEPS,
    ),
    "a filled mask is read again": Mutant(
        "drafters.models.hf_dllm:Dllm._denoise",
        "torch.where(left[..., None], logits, levels)",
        "logits",
        *STEPS,
    ),
    "a mask is filled with a mask": Mutant(
        "drafters.models.hf_dllm:Dllm._denoise",
        "if masked.mask_token < target.vocab_size:",
        "if False:",
        "test_dllm:test_no_mask_is_filled_with_a_mask",
        {},
    ),
    "siblings' nodes are ranked apart from their levels": Mutant(
        "drafters.drafting.tree:_Growth.children",
        "logits.shape[:2]).expand(-1, len(fans), -1)",
        "logits.shape[:2])",
        "test_expand:test_one_row_stands_for_all_nodes_of_a_level",
        {"plan": Plan(tree=FORKED, proposal="sampled")},
    ),
    # -- calibration
    "the longest paths first": Mutant(
        "decode.planning.calibrated_tree:best_tree",
        "-reached.get(other, 0)",
        "-len(other)",
        "test_calibrate:test_the_greedy_tree_is_the_best_of_all_trees",
        {"seed": 0, "nodes": 3},
    ),
    "a tree without siblings": Mutant(
        "decode.planning.calibrated_tree:best_tree",
        "((*path[:-1], path[-1] + 1), (*path, 0))",
        "((*path, 0),)",
        "test_calibrate:test_the_greedy_tree_is_the_best_of_all_trees",
        {"seed": 0, "nodes": 3},
    ),
    "ranks of the next token": Mutant(
        "decode.planning.calibrated_tree:_ranks",
        "place : place + plan.depth",
        "place - 1 : place - 1 + plan.depth",
        "test_calibrate:test_ranks_are_counted_along_the_answers",
        {},
    ),
    "a round emits no token of its own": Mutant(
        "decode.planning.calibrated_tree:rounds",
        "kept + 1",
        "max(kept, 1)",
        "test_calibrate:test_what_counts_is_where_rounds_begin",
        {},
    ),
    "rounds begin everywhere": Mutant(
        "decode.planning.calibrated_tree:Calibrated.choose",
        "rounds(answer, set(tree))",
        "answer",
        "test_calibrate:test_what_counts_is_where_rounds_begin",
        {},
    ),
    "another target's drafter is loaded": Mutant(
        "drafters.checkpoint.io:load",
        "known.fingerprint != target.fingerprint()",
        "False",
        "test_hub:test_another_targets_drafter_is_refused",
        EAGLE,
    ),
}


def mutate(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    module, _, name = mutant.where.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        owner, function = function, inspect.getattr_static(function, part)
    if hasattr(function, "cache_clear"):  # what it has found must not outlive the mutant, nor precede it
        monkeypatch.setattr(owner, part, function.__wrapped__)
    # Of a cached property, of a property.
    function = inspect.unwrap(getattr(function, "func", getattr(function, "fget", function)))
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
    (path,) = (ROOT / "tests").rglob(f"{file}.py")
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
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


def of(*rooms: str) -> dict[str, Mutant]:
    """The mutants of these packages."""
    return {name: mutant for name, mutant in MUTANTS.items() if mutant.where.partition(".")[0] in rooms}


def noticed(mutants: dict[str, Mutant]) -> Callable[..., None]:
    """A test that every one of these bugs makes its killer fail."""

    @pytest.mark.parametrize("name", mutants)
    def test(monkeypatch, request, name):
        mutate(monkeypatch, mutants[name])
        # The second where nothing was raised; the third is the probe, when it meets a class first.
        with pytest.raises((AssertionError, pytest.fail.Exception, UserError)):
            run(request, mutants[name].killer, mutants[name].arguments)

    return test


def sound(mutants: dict[str, Mutant]) -> Callable[..., None]:
    """A test that the killers pass without a bug, once each."""
    found = {f"{m.killer} {m.arguments}": (m.killer, m.arguments) for m in mutants.values()}
    names = [f"{i}-{killer.partition(':test_')[2]}" for i, (killer, _) in enumerate(found.values())]

    @pytest.mark.parametrize("killer", found.values(), ids=names)
    def test(request, killer):
        run(request, *killer)

    return test
