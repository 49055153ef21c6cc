"""Grow a draft level by level from a drafter's logits: chain, static tree, dynamic tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import PAD, Draft, DraftProbs
from decode.plan import Path, Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler
from drafters.drafting.chain import Step, draft_chain, draft_parallel_chains
from drafters.vocabulary import Vocabulary, probs_of, target_ids

MANY = 20_000  # `largest` takes two steps from this many values on
BLOCK = 64


def expand(
    logits: Tensor,
    step: Step,
    sampler: Sampler,
    coin: Coin,
    plan: Plan,
    vocabulary: Vocabulary | None = None,
    confidence: Callable[[], Tensor] | None = None,
    limit: Tensor | None = None,
) -> Draft:
    """Draft from the logits below the root.

    Args:
        logits: (B, V) of the root's children; (B, V') over a reduced vocabulary.
        step: (tokens (B, W), parent (B, W)) -> (B, W, V) logits of the tokens' children, where
            `parent` indexes the W entries of the previous call (in the first call all are 0).
            Tokens are ids of the target. (B, 1, V) if all tokens of a level have the same children.
        sampler: warpers of sampled nodes.
        coin: source of randomness.
        plan: shape of the draft.
        vocabulary: reduced vocabulary of the logits; None: the target's. Tokens are chosen in it and
            mapped to ids of the target; sampling probabilities outside are 0, which is lossless.
        confidence: () -> (B, W) logits of acceptance, for the entries of the last `step`; called once
            per level, and only if the plan has a `min_confidence`.
        limit: (B,) maximum depth of each row, a function of settled tokens; None: `plan.depth`.
    """
    temperature = plan.proposal_temperature(sampler.temperature)
    warp = None
    if temperature is not None:
        # Any q is lossless. The repetition penalty is omitted, because it needs the history.
        warp = Sampler(temperature, sampler.top_k, sampler.top_p, sampler.min_p)
    grow = _Grower(coin, warp, plan, vocabulary)
    if warp is not None and plan.drafts > 1:
        draft = draft_parallel_chains(logits, step, warp, coin, plan, vocabulary)
    elif plan.width == 1:
        draft = draft_chain(logits, step, warp, coin, plan, vocabulary, confidence)
    elif plan.tree:
        draft = _static(logits, step, grow, plan)
    else:
        draft = _dynamic(logits, step, grow, plan, limit)
    if limit is None:
        return draft
    return replace(draft, tokens=draft.tokens.masked_fill(draft.levels[:, 1:] > limit[:, None], PAD))


@dataclass
class _Grower:
    """Chooses or samples children of nodes, and records the distributions of sampled ones.

    Args:
        coin: source of randomness.
        warp: warpers of sampled children; None: all children are fixed.
        plan: proposal and width.
        vocabulary: reduced vocabulary of the logits; None: the target's.
    """

    coin: Coin
    warp: Sampler | None
    plan: Plan
    vocabulary: Vocabulary | None = None
    probs: list[Tensor] = field(default_factory=list)  # (B, W, V) of each level

    @property
    def drawn(self) -> int:
        """Number of sampled children of a node; they come before fixed ones."""
        if self.warp is None:
            return 0
        return 1 if self.plan.proposal == "hybrid" else self.plan.width

    def children(self, logits: Tensor, fans: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(B, W, V or V') or (B, 1, V) logits -> (B, W, C) tokens and log-scores of the nodes' children.

        A score estimates the probability that the child is the accepted one. The score of a sampled
        child depends on its parent's distribution, never on the sampled token, so ranking and pruning
        by it keep the token's distribution.

        Args:
            logits: of the expanded nodes.
            fans: number of children of each of the W nodes; C is their maximum. Ignore entries past a
                node's number.
        """
        fan, vocab = max(fans), logits.shape[-1]
        count = min(fan, vocab)
        if self.warp is None:
            # Cast first: log_softmax with a dtype is slower on a CPU.
            score, token = largest(logits.float().log_softmax(-1), count)
            # NaN would rank above its parent.
            score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            token = target_ids(token, self.vocabulary)
        else:
            probs = probs_of(logits.flatten(0, 1), self.warp, self.vocabulary)
            probs = probs.unflatten(0, logits.shape[:2]).expand(-1, len(fans), -1)  # (B, W, V)
            if self.plan.proposal == "sampled":
                token = self._draw(probs, count)
                score = torch.zeros_like(token, dtype=probs.dtype)
            else:
                token, score = self._one_sampled(probs, fans, count)
        if count < fan:  # fewer tokens than children
            token = F.pad(token, (0, fan - count), value=PAD)
            score = F.pad(score, (0, fan - count), value=-torch.inf)
        return token.expand(-1, len(fans), -1), score.expand(-1, len(fans), -1)

    def _one_sampled(self, probs: Tensor, fans: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
        """One child sampled from the distribution without the top tokens, followed by the top tokens.

        The score of the sampled child is the mass outside the top tokens.
        """
        top_probs, token = probs.topk(count - 1)
        is_child = _fixed_children(fans, probs.device)[:, : count - 1]
        rest = probs.scatter(-1, token, top_probs.masked_fill(is_child, 0.0))
        mass = rest.sum(-1, keepdim=True)  # (B, W, 1)
        tiny = torch.finfo(probs.dtype).tiny  # smaller masses are rounded too coarsely for sampling
        drawn = self._draw((rest / mass.clamp_min(tiny)).masked_fill(mass < tiny, 0.0), 1)
        return torch.cat([drawn, token], -1), torch.cat([mass, top_probs], -1).log()

    def _draw(self, probs: Tensor, count: int) -> Tensor:
        """(B, W, V) probs -> (B, W, count) sampled children; `PAD` once no mass is left."""
        first = sum(q.shape[1] for q in self.probs)
        self.probs.append(probs)
        tokens = []
        for number in range(count):
            drawable = probs.sum(-1) > 0  # (B, W)
            token = self.coin.draw(probs, Key(Purpose.PROPOSE, first, number), drawable)
            tokens.append(torch.where(drawable, token, PAD))
            if number + 1 < count and not self.plan.replacement:
                probs = probs.scatter(-1, token[..., None], 0.0)
        return torch.stack(tokens, -1)

    def draft(
        self,
        token: Tensor,
        parent: Tensor,
        owner: Tensor,
        rank: Tensor,
        depth: int,
        reach: Tensor | None = None,
    ) -> Draft:
        """Build the draft from (B, N) tokens, parents and sibling ranks, and (B, Q) expanded slots."""
        if not self.probs:
            return Draft(token, parent, depth, ancestor_mask=reach)
        levels = tuple(q.shape[1] for q in self.probs)
        sampled = (rank < self.drawn).expand_as(token)
        q = torch.cat(self.probs, 1)
        ranked = not self.plan.tree
        draft_probs = DraftProbs(q, owner, levels, sampled, self.drawn, self.plan.replacement, ranked=ranked)
        return Draft(token, parent, depth, draft_probs, ancestor_mask=reach)


@lru_cache(maxsize=64)
def _fixed_children(fans: tuple[int, ...], device: torch.device) -> Tensor:
    """(W, C - 1) bool: ranks of each node's fixed children, in addition to one drawn child."""
    with torch.inference_mode(False):  # cached tensors are also used outside inference mode
        rank = torch.arange(max(fans) - 1, device=device)
        return torch.tensor(fans, device=device)[:, None] - 1 > rank


def _dynamic(logits: Tensor, step: Step, grow: _Grower, plan: Plan, limit: Tensor | None) -> Draft:
    """EAGLE-2's tree (arXiv:2406.16858, section 4): expand the best nodes, then keep the best of all.

    A sampled token affects only scores of its descendants, which rank below it, so the selection does not
    depend on the token itself.
    """
    best = _beam(logits, step, grow, plan, limit)
    draft = grow.draft(best.tokens, best.parents, best.owner, best.rank, plan.depth)
    return replace(draft, score=best.score)


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` of (..., V); for large V on a CPU in two steps, since maxima are faster there."""
    size = x.shape[-1]
    if x.device.type != "cpu" or x.numel() < MANY or size % BLOCK or size < BLOCK * count:
        return x.topk(count)
    blocks = x.unflatten(-1, (-1, BLOCK))
    chosen = (
        blocks.amax(-1).topk(count).indices[..., None]
    )  # (..., C, 1): each holds one of the largest, or none
    value, index = blocks.gather(-2, chosen.expand(*chosen.shape[:-1], BLOCK)).flatten(-2).topk(count)
    return value, chosen[..., 0].gather(-1, index // BLOCK) * BLOCK + index % BLOCK


class Beam(NamedTuple):
    """The best nodes of a beam search, parents before children.

    Attributes:
        tokens: (B, N), `PAD` past a row's nodes.
        parents: (B, N), -1 for the root.
        score: (B, N) log-probability of the path; -inf past a row's nodes.
        rank: (B, N) rank among siblings.
        owner: (B, Q) slots of expanded nodes; -1 if the node was dropped.
    """

    tokens: Tensor
    parents: Tensor
    score: Tensor
    rank: Tensor
    owner: Tensor


def best_nodes(
    logits: Tensor, step: Step, coin: Coin, plan: Plan, limit: Tensor, vocabulary: Vocabulary | None = None
) -> Beam:
    """`_beam` with fixed children."""
    return _beam(logits, step, _Grower(coin, None, plan, vocabulary), plan, limit)


def _beam(logits: Tensor, step: Step, grow: _Grower, plan: Plan, limit: Tensor | None = None) -> Beam:
    """Expand the `plan.width` best nodes of each level, then keep the `plan.nodes` best of all levels.

    Scores are log-probabilities of paths, so a child never outranks its parent, and the selected nodes form
    a tree. Ties go to the older candidate.

    Args:
        logits: as in `expand`.
        step: as in `expand`.
        grow: makes children.
        plan: depth, width and nodes.
        limit: (B,) maximum depth of each row; None: `plan.depth`.
    """
    rows, width = logits.shape[0], plan.width
    # Candidates of all levels are numbered in order, from 1; 0 is the root.
    beam = torch.zeros(rows, 1, dtype=torch.long, device=logits.device)
    score = torch.zeros(rows, 1, dtype=torch.float32, device=logits.device)
    child, gain = grow.children(logits[:, None], (width,))  # (B, W, C)
    scores, tokens, beams, total = [], [], [beam], 0
    for level in range(plan.depth):
        reached = (score[..., None] + gain).flatten(1)  # (B, W * C) log-probabilities of paths
        if limit is not None:
            reached = reached.masked_fill((limit <= level)[:, None], -torch.inf)
        scores.append(reached)
        tokens.append(child.flatten(1))
        if level + 1 < plan.depth:
            score, best = _best(scores[-1], width)
            beams.append(best + (total + 1))  # numbers of the expanded candidates
            total += scores[-1].shape[1]
            logits = step(tokens[-1].gather(1, best).clamp_min(0), best // width)  # PAD is read as token 0
            child, gain = grow.children(logits, (width,) * width)
    score, token, owner = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(beams, 1)
    token = token.masked_fill(score == -torch.inf, PAD)
    selection = _best(score, min(plan.nodes, score.shape[1]))[1].sort(-1).values  # parents before children
    slot_of = torch.zeros(rows, score.shape[1] + 1, dtype=torch.long, device=selection.device)
    order = torch.arange(1, selection.shape[1] + 1, device=selection.device).expand_as(selection)
    slot = slot_of.scatter(1, selection + 1, order).gather(1, owner)  # of each expanded node
    # Candidate i is a child of the (i // width)-th expanded node.
    node = slot.gather(1, selection // width) - 1
    slot[:, 1:].masked_fill_(slot[:, 1:] == 0, -1)  # expanded but not selected
    return Beam(token.gather(1, selection), node, score.gather(1, selection), selection % width, slot)


def _best(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, n) -> (B, count) values and indices in descending order; a stable top-k."""
    value, index = score.sort(dim=-1, descending=True, stable=True)
    return value[:, :count], index[:, :count]


def _static(logits: Tensor, step: Step, grow: _Grower, plan: Plan) -> Draft:
    """A tree of fixed shape (Medusa, arXiv:2401.10774)."""
    rows, device = logits.shape[0], logits.device
    indices = _tree_indices(plan.tree, device)
    logits, tokens = logits[:, None], []
    for level in indices.levels:
        grown = tokens[-1][:, level.grown] if tokens else None  # (B, W)
        if grown is not None:
            logits = step(grown.clamp_min(0), level.entry.expand(rows, -1))
        child, _ = grow.children(logits, level.fans)  # (B, W, C)
        if grown is not None:  # a missing node has no children
            child = child.masked_fill((grown == PAD)[..., None], PAD)
        tokens.append(child.flatten(1)[:, level.taken])
    parents, owner = indices.parents.expand(rows, -1), indices.owner.expand(rows, -1)
    return grow.draft(torch.cat(tokens, 1), parents, owner, indices.rank, plan.depth, indices.reach)


class _Level(NamedTuple):
    """One level of a static tree, as indices."""

    grown: Tensor  # (W,) nodes with children, as indices into their level
    entry: Tensor  # (W,) their parents, as indices into the expanded nodes of the level above
    fans: tuple[int, ...]  # number of children of each
    taken: Tensor  # nodes of the next level, as indices into the (W * C) children


class _TreeIndices(NamedTuple):
    levels: list[_Level]
    owner: Tensor  # (1, Q) slots of expanded nodes, level by level
    parents: Tensor  # (1, N)
    reach: Tensor  # (1, S, S) `Draft.ancestors`
    rank: Tensor  # (N,) among siblings


@lru_cache(maxsize=16)
def _tree_indices(tree: tuple[Path, ...], device: torch.device) -> _TreeIndices:
    """Indices of a tree given as sorted paths of child ranks."""
    place = {(): -1} | {path: i for i, path in enumerate(tree)}
    levels: list[_Level] = []
    owners: list[Path] = []
    parent_paths: list[Path] = []
    level_paths: list[Path] = [()]
    with torch.inference_mode(False):  # cached tensors are also used outside inference mode

        def tensor(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device)

        while grown := [path for path in level_paths if (*path, 0) in place]:
            fans = tuple(sum(path[:-1] == up for path in tree) for up in grown)
            below = [path for path in tree if path[:-1] in grown]
            levels.append(
                _Level(
                    tensor(level_paths.index(path) for path in grown),
                    tensor(parent_paths.index(path[:-1]) if path else 0 for path in grown),
                    fans,
                    tensor(grown.index(path[:-1]) * max(fans) + path[-1] for path in below),
                )
            )
            owners += grown
            parent_paths, level_paths = grown, below
        owner = tensor(place[path] + 1 for path in owners)[None]
        parents = tensor(place[path[:-1]] for path in tree)[None]
        reach = Draft(parents, parents, max(map(len, tree))).ancestors()
        return _TreeIndices(levels, owner, parents, reach, tensor(path[-1] for path in tree))
