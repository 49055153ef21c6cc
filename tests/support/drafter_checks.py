"""A drafter in training (`unroll`) and in decoding, fed a known text; without training, its plain forward."""

from __future__ import annotations

import pytest
import torch
from self_drafts import self_drafted

from decode.draft import PAD, Draft
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Purpose
from decode.sampling import Sampler
from drafters.base import Batch, Text
from drafters.families.block import BlockDrafter
from drafters.families.lookup import FixedNodesDrafter
from drafters.families.two_drafters import TwoDrafters
from drafters.zoo.recycle import RECENT, Recycle

K = 3
V = 40
ONE = Sampler(1.0)
SAMPLED, CHAIN = Plan(depth=K, proposal="sampled"), Plan(depth=K)
TREE = Plan(depth=K, width=3, nodes=8)
ROUNDING = 1e-5  # of fp32, where shapes differ
CHUNKS = [(5, 3), (1, 4), (3, 1), (2, 2), (1, 1), (4, 3)]  # tokens settled by each of two rows


def both(tiny_target, make_drafter, name, **options):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter(name, target, depth=K, **options)
    # A random drafter's hidden states are large: softer rows leave every token a visible mass. A
    # block's have passed a norm.
    with torch.no_grad():
        target.model.lm_head.weight.mul_(1.0 if isinstance(drafter, BlockDrafter) else 0.3)
    return target, drafter


def may_be_first(drafter) -> bool:
    """Whether a drafter may be the first of a union: neither a lookup nor one that drafts as it verifies."""
    return (
        not isinstance(drafter, TwoDrafters | FixedNodesDrafter) and not drafter.traits.drafts_in_verification
    )


def random_texts(rows=2, length=24, seed=1) -> torch.Tensor:
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_rollouts(vocab, rows=40, length=60) -> list[Text]:
    """Texts in which a few tokens are frequent, the same wherever they are asked for."""
    dice = torch.Generator().manual_seed(4)
    weights = 1 / torch.arange(3, vocab + 3)[torch.randperm(vocab, generator=dice)]
    texts = torch.multinomial(weights.expand(rows, -1), length, replacement=True, generator=dice)
    return [Text(text, [0] * 5 + [1] * (length - 5)) for text in texts.tolist()]


def batch_of(target: Target, texts: torch.Tensor, mask=None) -> Batch:
    read = target.read(texts)
    mask = torch.ones_like(texts, dtype=torch.bool) if mask is None else mask
    return Batch(texts, mask, read.taps, read.last)


@torch.no_grad()
def unrolled(drafter, target, texts) -> dict[tuple[int, int, int], torch.Tensor]:
    """(row, anchor, depth) -> probabilities in training; of two drafters those of the first, which draws."""
    if isinstance(drafter, TwoDrafters):
        drafter = drafter.first
    if not drafter.trains:
        return plainly(drafter, target, texts)
    all_probs = {}
    for step in drafter.unroll(batch_of(target, texts), target):
        if not step.depth:  # no draft, but the tuned target's own row
            continue
        rows = named(step.head.d2t, step.head(step.hidden).softmax(-1), target.vocab_size)
        for flat, probs in zip(step.anchor.tolist(), rows, strict=True):
            all_probs[(flat // texts.shape[1], flat % texts.shape[1], step.depth)] = probs
    if drafter.traits.depth_invariant:
        for (row, t, _), probs in list(all_probs.items()):
            all_probs |= {(row, t - ahead, 1 + ahead): probs for ahead in range(1, K) if t >= ahead}
    return all_probs


def named(ids: torch.Tensor | None, probs: torch.Tensor, size: int) -> torch.Tensor:
    """A distribution over a draft vocabulary -> (..., V) over the target's."""
    return probs if ids is None else probs.new_zeros(*probs.shape[:-1], size).index_copy_(-1, ids, probs)


def plainly(drafter, target, texts) -> dict[tuple[int, int, int], torch.Tensor]:
    """(row, anchor, depth) -> the distribution of token anchor + 1 + depth, from one pass without a cache."""
    if isinstance(drafter, Recycle):
        return recycled(drafter, target, texts)
    if drafter.traits.reads_cache:
        return self_drafted(drafter, target, texts, K)
    if hasattr(drafter, "model"):
        rows = drafter.model(input_ids=texts, use_cache=False).logits.softmax(-1)
    else:
        rows = drafter.logits(texts, torch.float32).softmax(-1)
    return {
        (row, t, depth): rows[row, t + depth]
        for row in range(texts.shape[0])
        for t in range(texts.shape[1])
        for depth in range(1, K + 1)
        if t + depth + 1 < texts.shape[1]
    }


def recycled(drafter, target, texts) -> dict[tuple[int, int, int], torch.Tensor]:
    """`Recycle`, place by place: a token's newest places in the text up to the anchor, and the table."""
    table = drafter.logits(texts, torch.float32).softmax(-1)  # (B, T, V)
    expected = target.head(target.read(texts).last).softmax(-1)
    all_probs = {}
    for row, text in enumerate(texts.tolist()):
        for t in range(len(text) - 2):
            for depth in range(1, min(K, len(text) - t - 2) + 1):
                places = [i for i in range(t, -1, -1) if text[i] == text[t + depth]][:RECENT]
                weights = [drafter.decay**age for age in range(len(places))]
                own = sum(
                    w * only_best(expected[row, i], drafter.candidates)
                    for w, i in zip(weights, places, strict=True)
                )
                share = drafter.own_weight if places else 0.0
                probs = (1 - share) * table[row, t + depth] + share * own / max(sum(weights), 1)
                all_probs[(row, t, depth)] = probs / probs.sum()
    return all_probs


def only_best(probs: torch.Tensor, count: int) -> torch.Tensor:
    """A distribution without all but its most probable tokens, not renormalised."""
    return torch.where(probs >= probs.topk(count).values[-1], probs, 0.0)


class Dictate:
    """A coin that draws what it is told: the drafter is teacher-forced."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def draw(self, weights, key, active):
        assert key.purpose == Purpose.PROPOSE
        return self.tokens[:, key.slot]


class Follower:
    """Feeds known texts to a decoding drafter, as the loop would; `counts`: of a first round."""

    def __init__(self, drafter, target, texts, counts=None) -> None:
        self.drafter, self.target, self.texts = drafter, drafter.verifier(target), texts
        self.taps = self.target.read(texts).taps
        self.state = drafter.new_state(len(texts))
        self.settled = [0] * len(texts)
        self.cache = None  # the target's, as the loop has it at `advance` and `propose`
        if drafter.traits.reads_cache:
            self.target.start(len(texts), 64)
            self.cache = self.target.cache
        if counts:
            self.advance(counts)

    def resume(self) -> None:
        """Let the target continue these texts: several followers share it."""
        if self.cache:
            self.target.resume(self.cache)

    @torch.no_grad()
    def advance(self, counts) -> None:
        width = max(counts) + 1  # one more than needed: padding must be ignored
        tokens = torch.randint(V, (len(counts), width))
        taps = torch.randn(len(counts), width, *self.taps.shape[2:], dtype=self.taps.dtype)
        root = torch.empty(len(counts), dtype=torch.long)
        for row, count in enumerate(counts):
            start, end = self.settled[row], self.settled[row] + count
            tokens[row, :count], taps[row, :count] = self.texts[row, start:end], self.taps[row, start:end]
            root[row], self.settled[row] = self.texts[row, end], end
        self.resume()
        if self.cache:
            self.target.extend(tokens)
            self.target.keep(counts)
        self.drafter.advance(self.state, self.target, tokens, taps, list(counts), root)

    def select(self, rows) -> None:
        self.drafter.select(self.state, rows)
        self.texts, self.taps = self.texts[rows], self.taps[rows]
        self.settled = [self.settled[r] for r in rows]
        if self.cache:
            self.cache.store.select(rows)

    @torch.no_grad()
    def append(self, other: Follower) -> None:
        self.drafter.append(self.state, self.target, other.state)
        self.texts = torch.cat([self.texts, other.texts])
        self.taps = torch.cat([self.taps, other.taps])
        self.settled += other.settled
        if self.cache:
            self.cache.store.append(other.cache.store)

    @property
    def known(self) -> list[list[int]]:
        """The settled tokens and the root of every row."""
        return [self.texts[row, : end + 1].tolist() for row, end in enumerate(self.settled)]

    @property
    def anchors(self) -> list[int]:
        """Anchor t has read taps up to t, and x_{t+1} is the root."""
        return [n - 1 for n in self.settled]

    @torch.no_grad()
    def propose(self, plan, sampler=ONE) -> Draft:
        """A sampled chain is dictated the text that follows."""
        ahead = [self.texts[row, n + 1 : n + 1 + K] for row, n in enumerate(self.settled)]
        coin = Dictate(torch.stack(ahead))
        self.resume()
        return self.drafter.propose(self.state, self.target, sampler, coin, plan)


def probs_at(drafter, target, places) -> list[torch.Tensor]:
    """Probabilities in training below every (prefix, path); all are read at once, and zeros follow."""
    size = 1 + max(len(prefix) + len(path) for prefix, path in places)
    texts = [([*prefix, *path] + [0] * size)[:size] for prefix, path in places]
    all_probs = unrolled(drafter, target, torch.tensor(texts))
    return [all_probs[row, len(prefix) - 2, len(path) + 1] for row, (prefix, path) in enumerate(places)]


def probs_below(drafter, target, prefix, path) -> list[torch.Tensor]:
    """Probabilities in training at the root and below every node of a path."""
    text = torch.tensor([[*prefix, *path, 0]])
    all_probs = unrolled(drafter, target, text)
    return [all_probs[(0, len(prefix) - 2, depth)] for depth in range(1, len(path) + 2)]


def assert_decodes_as_trained(drafter, target, texts, chunks=CHUNKS) -> Follower:
    """A chain has the distributions of training wherever a round begins; returns the follower, at the end."""
    all_probs, follower = unrolled(drafter, target, texts), Follower(drafter, target, texts)
    for counts in chunks:
        follower.advance(counts)
        draft = follower.propose(SAMPLED)
        assert draft.q is not None
        assert draft.q.shape == (len(texts), K, V)
        assert draft.is_chain
        for row, anchor in enumerate(follower.anchors):
            for depth in range(1, K + 1):
                want = all_probs[(row, anchor, depth)]
                torch.testing.assert_close(draft.q[row, depth - 1], want, rtol=0, atol=ROUNDING)
    return follower


def plans_of(drafter) -> list[Plan]:
    """Those of a sampled chain, a chosen chain and a tree that a drafter can make."""
    return [plan for plan in (SAMPLED, CHAIN, TREE) if plan.proposal in drafter.traits.proposals]


def able(drafter, plan):
    """The drafter, if it can make such a plan's nodes; that it refuses the others is tested."""
    if plan.proposal not in drafter.traits.proposals:
        pytest.skip(f"makes no {plan.proposal} nodes")
    return drafter


def alike(one: Draft, row: int, other: Draft, place: int) -> bool:
    """Whether row `row` of one draft is row `place` of another, but for padding and rounding of q."""
    if (one.q is None) != (other.q is None):
        return False
    close = one.q is None or bool((one.q[row] - other.q[place]).abs().max() <= ROUNDING)
    return close and paths(one, row) == paths(other, place)


def paths(draft: Draft, row: int) -> dict[tuple[int, ...], int]:
    """Every node's path of tokens -> its index."""
    found = {(): -1}
    names = {-1: ()}
    for node, (token, parent) in enumerate(
        zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
    ):
        if token != PAD:
            assert parent < node, "parents come first"
            names[node] = (*names[parent], token)
            assert names[node] not in found, "siblings are the same token"
            found[names[node]] = node
    return found


def best_paths(log_probs, plan: Plan) -> list[tuple[int, ...]]:
    """EAGLE-2's tree in plain Python: `log_probs(paths)` gives (V,) rows below each."""
    looked: dict[tuple[int, ...], float] = {}
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(plan.depth):
        level = {}
        for (path, score), probs in zip(beams.items(), log_probs(list(beams)), strict=True):
            top = probs.topk(min(plan.width, len(probs)))
            level |= {
                (*path, t): score + v for t, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            }
        looked |= level
        beams = dict(sorted(level.items(), key=lambda kv: -kv[1])[: plan.width])
    return sorted(looked, key=lambda path: -looked[path])[: plan.nodes]


def equal(one: Draft, other: Draft, atol: float = 0.0) -> bool:
    same = torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
    if one.q is None or other.q is None:
        return same and one.q is other.q
    return same and bool((one.q - other.q).abs().max() <= atol)


def feed(drafter, target, texts, cuts=()):
    """A state that has read the texts (their last token is the root), in pieces that end at `cuts`."""
    state, known = drafter.new_state(len(texts)), [0] * len(texts)
    for cut in [*cuts, max(map(len, texts))]:
        ends = [max(min(cut, len(text)), k + 2) for text, k in zip(texts, known, strict=True)]
        if any(end > len(text) for end, text in zip(ends, texts, strict=True)):
            continue  # a row settles a token every time; give it its rest at once
        counts = [end - 1 - k for end, k in zip(ends, known, strict=True)]
        tokens = torch.full((len(texts), max(counts) + 1), 7)  # padding is ignored
        for row, (text, k, n) in enumerate(zip(texts, known, counts, strict=True)):
            tokens[row, :n] = torch.tensor(text[k : k + n])
        root = torch.tensor([text[end - 1] for text, end in zip(texts, ends, strict=True)])
        drafter.advance(state, target, tokens, torch.empty(*tokens.shape, 0, 8), counts, root)
        known = [k + n for k, n in zip(known, counts, strict=True)]
    return state


def propose(drafter, target, state, plan) -> Draft:
    return drafter.propose(state, target, Sampler(0.0), None, plan)
