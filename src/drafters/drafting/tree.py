"""Growing a draft level by level, for any drafter that conditions on its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import PAD, Draft, Laws
from decode.plan import Path, Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler
from drafters.drafting.chain import Step, draft_chain, draft_parallel_chains
from drafters.drafting.vocabulary import Vocabulary, probs_of, target_ids


def expand(
    logits: Tensor,
    step: Step,
    sampler: Sampler,
    coin: Coin,
    plan: Plan,
    vocabulary: Vocabulary | None = None,
    confidence: Callable[[], Tensor] | None = None,
) -> Draft:
    """Draft from the logits below the root.

    Args:
        logits: (B, V) of the root's children; (B, V') over a reduced vocabulary.
        step: (tokens (B, W), parent (B, W)) -> (B, W, V) logits of the tokens' children, where
            `parent` indexes the W entries of the previous call (in the first call all are 0).
            Tokens are the target's, whatever the vocabulary. (B, 1, V) where the
            children of all of them are the same.
        sampler: the law that sampled nodes are drawn from.
        coin: draws them.
        plan: shape.
        vocabulary: of the logits, if it is not the target's. Tokens are chosen in it and then
            named; a law that tokens are drawn from is 0 outside, which no rule minds.
        confidence: () -> (B, W) logits, of the entries that the newest logits belong to, that a token
            drawn from these is accepted; asked for once a level, and only where the plan looks.
    """
    temperature = plan.draws_at(sampler.temperature)
    warp = None
    if temperature is not None:
        # The drafter's own warpers may be anything; a penalty would need the history it has not.
        warp = Sampler(temperature, sampler.top_k, sampler.top_p, sampler.min_p)
    if warp is not None and plan.drafts > 1:
        return draft_parallel_chains(logits, step, warp, coin, plan, vocabulary)
    if plan.width == 1:
        return draft_chain(logits, step, warp, coin, plan, vocabulary, confidence)
    grow = _Grower(coin, warp, plan, vocabulary)
    return _static(logits, step, grow, plan) if plan.tree else _dynamic(logits, step, grow, plan)


@dataclass
class _Grower:
    """Children of a level's nodes, and the laws they were drawn from.

    Args:
        coin: draws.
        warp: the law of sampled children; None where all are fixed.
        plan: proposal and width.
        vocabulary: of the logits, if it is not the target's.
    """

    coin: Coin
    warp: Sampler | None
    plan: Plan
    vocabulary: Vocabulary | None = None
    laws: list[Tensor] = field(default_factory=list)  # (B, W, V) of each level

    @property
    def drawn(self) -> int:
        """Sampled children a node has; they come first."""
        if self.warp is None:
            return 0
        return 1 if self.plan.proposal == "hybrid" else self.plan.width

    def children(self, logits: Tensor, fans: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(B, W, V or V') or (B, 1, V) logits -> (B, W, C) tokens and log-scores of the nodes' children.

        A score is the drafter's own estimate that the child will be the one accepted. A sampled
        child's is a function of its parent's law, never of the token drawn, so ranking and cutting
        by it leaves the law as it was.

        Args:
            logits: of the nodes that are grown from.
            fans: children that each of the W is to have; C is the most, ranks past a node's own
                number mean nothing.
        """
        fan, vocab = max(fans), logits.shape[-1]
        count = min(fan, vocab)
        if self.warp is None:
            score, token = logits.log_softmax(-1, dtype=torch.float32).topk(count)
            # NaN would rank above the parent; logits that are not finite have no likeliest token.
            score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            token = target_ids(token, self.vocabulary)
        else:
            probs = probs_of(logits.flatten(0, 1), self.warp, self.vocabulary)
            probs = probs.unflatten(0, logits.shape[:2]).expand(-1, len(fans), -1)  # (B, W, V)
            if self.plan.proposal == "sampled":
                token = self._draw(probs, count)
                score = torch.zeros_like(token, dtype=probs.dtype)
            else:
                token, score = self._one_drawn(probs, fans, count)
        if count < fan:  # a vocabulary smaller than a node's children
            token = F.pad(token, (0, fan - count), value=PAD)
            score = F.pad(score, (0, fan - count), value=-torch.inf)
        return token.expand(-1, len(fans), -1), score.expand(-1, len(fans), -1)

    def _one_drawn(self, probs: Tensor, fans: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
        """One child drawn from what the node's likeliest tokens leave over, then those."""
        top_probs, token = probs.topk(count - 1)
        is_child = torch.tensor(fans, device=probs.device)[:, None] - 1 > torch.arange(
            count - 1, device=probs.device
        )
        rest = probs.scatter(-1, token, top_probs.masked_fill(is_child, 0.0))
        mass = rest.sum(-1, keepdim=True)  # (B, W, 1)
        drawn = self._draw(rest / mass.clamp_min(torch.finfo(probs.dtype).tiny), 1)
        return torch.cat([drawn, token], -1), torch.cat([mass, top_probs], -1).log()

    def _draw(self, probs: Tensor, count: int) -> Tensor:
        """(B, W, V) laws -> (B, W, count) drawn children, `PAD` once nothing is left to draw."""
        first = sum(q.shape[1] for q in self.laws)
        self.laws.append(probs)
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
        """(B, N) tokens, parents, and child ranks; (B, Q) the slots that were grown from."""
        if not self.laws:
            return Draft(token, parent, depth, reach=reach)
        levels = tuple(q.shape[1] for q in self.laws)
        sampled = (rank < self.drawn).expand_as(token)
        q = torch.cat(self.laws, 1)
        ranked = not self.plan.tree
        laws = Laws(q, owner, levels, sampled, self.drawn, self.plan.replacement, ranked=ranked)
        return Draft(token, parent, depth, laws, reach=reach)


def _dynamic(logits: Tensor, step: Step, grow: _Grower, plan: Plan) -> Draft:
    """EAGLE-2's tree (arXiv:2406.16858, section 4): expand the best, then keep the best of all.

    What a drawn token changes, the scores below it, ranks below it, so it decides nothing about the
    token itself.
    """
    best = _beam(logits, step, grow, plan)
    return grow.draft(best.tokens, best.parents, best.owner, best.rank, plan.depth)


class Beam(NamedTuple):
    """The best nodes of those that were looked at, parents before children.

    Attributes:
        tokens: (B, N), `PAD` where there were fewer.
        parents: (B, N), -1 for the root.
        score: (B, N) log-probability of the path; -inf where there were fewer.
        rank: (B, N) among its siblings.
        owner: (B, Q) slots that were grown from; -1: left out.
    """

    tokens: Tensor
    parents: Tensor
    score: Tensor
    rank: Tensor
    owner: Tensor


def best_nodes(logits: Tensor, step: Step, coin: Coin, plan: Plan, limit: Tensor) -> Beam:
    """`_beam` of chosen tokens in the target's vocabulary."""
    return _beam(logits, step, _Grower(coin, None, plan), plan, limit)


def _beam(logits: Tensor, step: Step, grow: _Grower, plan: Plan, limit: Tensor | None = None) -> Beam:
    """Grow level by level from the best of each, then keep the best of all.

    Scores are log-probabilities of whole paths, so a child never outranks its parent and the kept
    set is a tree; ties go to the older candidate.

    Args:
        logits: as in `expand`.
        step: as in `expand`.
        grow: makes children.
        plan: depth, width and nodes.
        limit: (B,) levels of each row; None: all.
    """
    rows, width = logits.shape[0], plan.width
    beam = torch.zeros(rows, 1, dtype=torch.long, device=logits.device)  # candidate, counted from 1
    score = torch.zeros(rows, 1, dtype=torch.float32, device=logits.device)
    child, gain = grow.children(logits[:, None], (width,))  # (B, W, C)
    scores, tokens, beams, total = [], [], [beam], 0
    for level in range(plan.depth):
        reached = (score[..., None] + gain).flatten(1)
        if limit is not None:
            reached = reached.masked_fill((limit <= level)[:, None], -torch.inf)
        scores.append(reached)
        tokens.append(child.flatten(1))
        if level + 1 < plan.depth:
            score, best = _best(scores[-1], width)
            beams.append(best + (total + 1))
            total += scores[-1].shape[1]
            logits = step(tokens[-1].gather(1, best).clamp_min(0), best // width)
            child, gain = grow.children(logits, (width,) * width)
    score, token, owner = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(beams, 1)
    token = token.masked_fill(score == -torch.inf, PAD)
    selection = _best(score, min(plan.nodes, score.shape[1]))[1].sort(-1).values  # parents before children
    slot_of = torch.zeros(rows, score.shape[1] + 1, dtype=torch.long, device=selection.device)
    order = torch.arange(1, selection.shape[1] + 1, device=selection.device).expand_as(selection)
    slot = slot_of.scatter(1, selection + 1, order).gather(1, owner)  # of each node that was grown from
    # Candidates come in groups of siblings, one for each node grown from, in its order.
    node = slot.gather(1, selection // width) - 1
    slot[:, 1:].masked_fill_(slot[:, 1:] == 0, -1)  # it was left out
    return Beam(token.gather(1, selection), node, score.gather(1, selection), selection % width, slot)


def _best(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, n) -> (B, count) the best and where they are, best first; of equals the first."""
    value, index = score.sort(dim=-1, descending=True, stable=True)
    return value[:, :count], index[:, :count]


def _static(logits: Tensor, step: Step, grow: _Grower, plan: Plan) -> Draft:
    """A tree whose form is known beforehand (Medusa, arXiv:2401.10774)."""
    rows, device = logits.shape[0], logits.device
    form = _form(plan.tree, device)
    logits, tokens = logits[:, None], []
    for level in form.levels:
        grown = tokens[-1][:, level.grown] if tokens else None  # (B, W)
        if grown is not None:
            logits = step(grown.clamp_min(0), level.entry.expand(rows, -1))
        child, _ = grow.children(logits, level.fans)  # (B, W, C)
        if grown is not None:  # nothing hangs from a node that is not there
            child = child.masked_fill((grown == PAD)[..., None], PAD)
        tokens.append(child.flatten(1)[:, level.taken])
    parents, owner = form.parents.expand(rows, -1), form.owner.expand(rows, -1)
    return grow.draft(torch.cat(tokens, 1), parents, owner, form.rank, plan.depth, form.reach)


class _Level(NamedTuple):
    """One level of a static tree, as indices."""

    grown: Tensor  # (W,) nodes that have children, within their own level
    entry: Tensor  # (W,) their parents, within the level grown before
    fans: tuple[int, ...]  # children of each
    taken: Tensor  # nodes of the next level, within the (W * C) children


class _Form(NamedTuple):
    levels: list[_Level]
    owner: Tensor  # (1, Q) slots that are grown from, level by level
    parents: Tensor  # (1, N)
    reach: Tensor  # (1, S, S)
    rank: Tensor  # (N,)


@lru_cache(maxsize=16)
def _form(tree: tuple[Path, ...], device: torch.device) -> _Form:
    """Indices of a tree given as sorted paths of child ranks."""
    place = {(): -1} | {path: i for i, path in enumerate(tree)}
    levels: list[_Level] = []
    owners: list[Path] = []
    parent_paths: list[Path] = []
    level_paths: list[Path] = [()]
    with torch.inference_mode(False):  # cached, so they must outlive the mode they were made in

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
        return _Form(levels, owner, parents, reach, tensor(path[-1] for path in tree))
