"""How much to draft, and how it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decode.depth_policy import Pace
from decode.errors import UserError

Path = tuple[int, ...]  # child ranks from the root to a node
# proposal -> the rule that `auto` stands for on a chain, and where nodes may have siblings
RULES_OF = {
    "fixed": ("match", "match"),
    "sampled": ("token", "recursive"),
    "hybrid": ("recursive", "recursive"),
}
LOSSLESS = ("match", "token", "block", "recursive", "traversal", "select")
LOSSY = ("typical", "threshold")


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a draft, where its tokens come from, and the rule that verifies it.

    Args:
        depth: levels below the root, in tokens; 0 is plain decoding.
        width: nodes that each level below the first is grown from, and children each of them
            is given (EAGLE-2, arXiv:2406.16858); 1 is a chain.
        nodes: nodes that are verified, the best by draft probability; 0 means `depth`.
        proposal: `fixed` takes the likeliest tokens; `sampled` draws them; `hybrid` gives a node one
            child drawn from what the likeliest leave over, and then the likeliest.
        drafts: chains drawn side by side (SpecDiff-2, arXiv:2511.00606), each of `depth` tokens.
        draft_temperature: that tokens are drawn at; None: the sampler's own.
        min_confidence: a row's chain ends before the product of its levels' confidences falls below
            this (SpecDec++, arXiv:2405.19715). They are read off laws, never off drawn tokens.
        rule: acceptance rule; `auto` is `match` for fixed drafts, `token` for a sampled chain and
            `recursive` for everything else.
        tree: a static tree (Medusa, arXiv:2401.10774): the path of child ranks to each node, in
            place of depth, width and nodes. Rank 0 is the first child: the likeliest, or the drawn one.
        replacement: sampled siblings may repeat one another.
        lossy: allows the rules that change the target's law.
        threshold: of the lossy rules, in probability.
        alpha: `typical` lowers the threshold to alpha * exp(-entropy).
        adapt: chains of at most `depth`, as long as past rounds and their costs advise; see `Pace`.

    Raises:
        UserError: a shape that no draft can have, or a combination that would not be lossless.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0
    proposal: str = "fixed"
    drafts: int = 1
    draft_temperature: float | None = None
    min_confidence: float = 0.0
    rule: str = "auto"
    tree: tuple[Path, ...] = ()
    replacement: bool = False
    lossy: bool = False
    threshold: float = 0.09
    alpha: float = 0.3
    adapt: Pace | None = None

    def __post_init__(self) -> None:
        if self.proposal not in RULES_OF:
            raise UserError(f"decode.proposal={self.proposal}: choose one of {', '.join(RULES_OF)}")
        object.__setattr__(self, "tree", tuple(self.tree))  # a list could not be hashed
        if self.tree:
            self._fit_tree()
        if self.depth < 0 or self.width < 1:
            raise UserError(f"decode: depth={self.depth}, width={self.width} must be >= 0 and >= 1")
        if self.proposal == "hybrid" and self.depth and self.width == 1:
            raise UserError("decode: a hybrid node has two children or more; set decode.width=2 or more")
        self._check_drafts()
        nodes = self.nodes or self.depth
        if nodes < self.depth:
            raise UserError(f"decode.nodes={nodes} is fewer than decode.depth={self.depth}")
        object.__setattr__(self, "nodes", nodes if self.width > 1 else self.drafts * self.depth)
        if self.proposal == "sampled" and self.width > 1 and not self.tree:
            raise UserError(
                "decode: a dynamic tree keeps the best of its nodes, and a sampled node that is dropped "
                "for its own token loses its law: not lossless. Give decode.tree (decode=static), "
                "width=1, or proposal=hybrid, whose sampled nodes are ranked before they are drawn"
            )
        if self.replacement and not (self.proposal == "sampled" and self.tree):
            raise UserError("decode.replacement is for sampled trees: decode=static proposal=sampled")
        self._choose_rule()
        self._check_rule()
        self._check_pace()

    def _check_drafts(self) -> None:
        if self.drafts < 1:
            raise UserError(f"decode.drafts={self.drafts} must be at least 1")
        if self.drafts > 1 and (self.proposal != "sampled" or self.width > 1 or self.tree):
            raise UserError(
                f"decode.drafts={self.drafts}: chains are drawn side by side; set decode.proposal=sampled "
                "and width=1, without a tree"
            )
        if self.min_confidence and (self.forks or not 0 < self.min_confidence < 1):
            raise UserError(
                f"decode.min_confidence={self.min_confidence}: from 0 to less than 1, and for a single "
                "chain; leave it 0, or set width=1 and drafts=1, without a tree"
            )
        if self.draft_temperature is None:
            return
        if self.draft_temperature < 0 or self.proposal == "fixed":
            raise UserError(
                f"decode.draft_temperature={self.draft_temperature}: must be at least 0, and is for tokens "
                "that are drawn: decode.proposal=sampled or hybrid"
            )

    def _fit_tree(self) -> None:
        """Read depth, width and nodes off the paths."""
        paths = tuple(sorted({tuple(int(r) for r in path) for path in self.tree}, key=lambda p: (len(p), p)))
        known = {(), *paths}
        for path in paths:
            elder = (*path[:-1], path[-1] - 1) if path and path[-1] else path[:-1]
            if not path or min(path) < 0 or path[:-1] not in known or elder not in known:
                raise UserError(f"decode.tree: {list(path)} has no {list(elder)} before it in the tree")
        object.__setattr__(self, "tree", paths)
        object.__setattr__(self, "depth", max(map(len, paths)))
        object.__setattr__(self, "width", 1 + max(map(max, paths)))
        object.__setattr__(self, "nodes", len(paths))

    def _choose_rule(self) -> None:
        if self.rule == "auto":
            object.__setattr__(self, "rule", RULES_OF[self.proposal][self.forks])
        if self.rule not in LOSSLESS + LOSSY:
            raise UserError(f"decode.rule={self.rule}: choose one of auto, {', '.join(LOSSLESS + LOSSY)}")
        if (self.rule in LOSSY) != self.lossy:
            raise UserError(
                f"decode.rule={self.rule} changes the target's law: it needs decode.lossy=true"
                if self.rule in LOSSY
                else f"decode.lossy=true, but rule={self.rule} is lossless: choose {' or '.join(LOSSY)}"
            )

    def _check_rule(self) -> None:
        """Refuse a rule that would not be lossless on such drafts."""
        if self.rule == "traversal" and self.proposal == "hybrid" and self.depth and not self.tree:
            raise UserError(
                "decode.rule=traversal weighs a subtree before the next one, and in a dynamic tree what is "
                "drawn in one decides what is kept of another: not lossless. Give decode.tree "
                "(decode=static), or rule=recursive"
            )
        if self.rule in ("token", "block") and (self.forks or self.proposal != "sampled"):
            raise UserError(
                f"decode.rule={self.rule} verifies a chain drawn from laws q: a chosen token has no such "
                f"law, and min(1, p/q) would not be lossless. Set width=1 proposal=sampled, or rule=match"
            )
        if self.rule == "select" and self.drafts == 1:
            raise UserError(
                "decode.rule=select keeps the best of several drafts: set decode.drafts=2 or more "
                "(decode=drafts), or rule=match"
            )

    def _check_pace(self) -> None:
        if isinstance(self.adapt, Mapping):
            object.__setattr__(self, "adapt", Pace.of(self.adapt))
        if self.adapt is None:
            return
        if not isinstance(self.adapt, Pace):
            raise UserError(f"decode.adapt={self.adapt}: give what foredraft advise prints, or null")
        if self.forks or self.lossy or self.adapt.deepest != self.depth:
            raise UserError(
                "decode.adapt is for a single lossless chain, with a cost for each of 0 to decode.depth="
                f"{self.depth} tokens; leave it out, or set width=1 and drafts=1, without a tree"
            )

    @property
    def forks(self) -> bool:
        """Whether a node may have several children."""
        return self.width > 1 or self.drafts > 1

    def draws_at(self, temperature: float) -> float | None:
        """Temperature of the laws that tokens are drawn from, at this one of the target; None: none is."""
        own = temperature if self.draft_temperature is None else self.draft_temperature
        # A hybrid node at temperature 0 would have nothing left to draw from.
        return None if self.proposal == "fixed" or (self.proposal == "hybrid" and not own) else own

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.depth == 0:
            return "plain"
        if self.drafts > 1:
            text = f"drafts-{self.drafts}x{self.depth}"
        elif self.width == 1:
            text = f"chain-{self.depth}" + ("-sampled" if self.proposal == "sampled" else "")
        else:
            kind = {"fixed": "tree", "sampled": "sampled-tree", "hybrid": "hybrid"}[self.proposal]
            kind = f"static-{kind}" if self.tree else kind
            text = f"{kind}-{self.nodes} (depth {self.depth}, width {self.width})"
        if self.min_confidence:
            text += f" (confidence {self.min_confidence:g})"
        if self.adapt is not None:
            text += " (adaptive)"
        if self.draft_temperature is not None:
            text += f" drawn at {self.draft_temperature:g}"
        if self.rule != RULES_OF[self.proposal][self.forks]:
            text += f" {self.rule}"
        return f"{text} LOSSY" if self.lossy else text
