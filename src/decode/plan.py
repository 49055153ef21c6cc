"""How much to draft, and how it is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decode.depth_policy import DepthPolicy
from decode.errors import UserError

Path = tuple[int, ...]  # child ranks from the root to a node
# proposal -> the rule that `auto` selects for a chain, and for a tree
AUTO_RULES = {
    "auto": ("auto", "auto"),  # until `resolved`
    "fixed": ("match", "match"),
    "sampled": ("token", "recursive"),
    "hybrid": ("recursive", "recursive"),
}
LOSSLESS = ("match", "token", "block", "recursive", "kseq", "traversal", "select")
LOSSY = ("typical", "threshold", "lenience", "topk", "bild", "sprint")
TAGS = 2  # that begin and end the part of a text in which `topk` accepts more


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of a draft, source of its tokens, and the rule that verifies it.

    Args:
        depth: levels below the root, in tokens; 0 is plain decoding.
        width: number of nodes expanded per level, and of children given to each (EAGLE-2,
            arXiv:2406.16858); 1 is a chain.
        nodes: number of nodes verified, the best by draft probability; 0 means `depth`.
        proposal: `fixed` takes the most likely tokens; `sampled` draws them; `hybrid` gives a node one
            child drawn from the rest of the distribution, and the most likely tokens as its others.
            `auto` is hybrid for trees above temperature 0 and fixed otherwise; see `resolved`.
        drafts: number of chains drawn side by side (SpecDiff-2, arXiv:2511.00606), of `depth` tokens each.
        draft_temperature: temperature that draft tokens are drawn at; None: the sampler's.
        min_confidence: end a row's chain before the product of its levels' confidences falls below
            this (SpecDec++, arXiv:2405.19715). Confidences depend on q, never on drawn tokens.
        rule: acceptance rule; `auto` is `match` for fixed drafts, `token` for a sampled chain and
            `recursive` otherwise.
        tree: a static tree (Medusa, arXiv:2401.10774): the path of child ranks to each node, instead
            of depth, width and nodes. Rank 0 is the most likely child, or the drawn one.
        replacement: draw siblings with replacement.
        lossy: allow rules that change the target's distribution.
        threshold: probability threshold of `typical` and `threshold`.
        alpha: `typical` lowers the threshold to alpha * exp(-entropy).
        lenience: `lenience` accepts a drawn token with probability min(1, p / (lenience q)).
        accept_top: `topk` accepts one of so many most probable tokens of the target,
        accept_ratio: whose probability is at least this share of the largest one.
        within: `topk` accepts these only between two tags, such as <think> and </think>: token ids, or
            their texts until `generation.text.with_tag_ids`. Empty: everywhere.
        rollback: `bild` rejects a token whose surprisal -log p is above this, in nats.
        adapt: choose the length of each chain, up to `depth`, from past rounds; see `DepthPolicy`.

    Raises:
        UserError: an impossible shape, or a combination that would not be lossless.
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
    lenience: float = 0.5
    accept_top: int = 3
    accept_ratio: float = 0.3
    within: tuple[int | str, ...] = ()
    rollback: float = 2.0
    adapt: DepthPolicy | None = None

    def __post_init__(self) -> None:
        if self.proposal not in AUTO_RULES:
            raise UserError(f"decode.proposal={self.proposal}: choose one of {', '.join(AUTO_RULES)}")
        object.__setattr__(self, "tree", tuple(self.tree))  # hashable
        object.__setattr__(self, "within", tuple(self.within))
        if self.tree:
            self._set_tree()
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
                "decode: a dynamic tree keeps the best of its nodes; dropping a sampled node because of "
                "its own token changes its distribution, which is not lossless. Give decode.tree "
                "(decode=static), width=1, or proposal=hybrid, which ranks sampled nodes before it draws them"
            )
        if self.replacement and not (self.proposal == "sampled" and self.tree):
            raise UserError("decode.replacement is for sampled trees: decode=static proposal=sampled")
        self._choose_rule()
        self._check_rule()
        self._check_lossy()
        self._check_pace()

    def _check_drafts(self) -> None:
        if self.drafts < 1:
            raise UserError(f"decode.drafts={self.drafts} must be at least 1")
        if self.drafts > 1 and (self.proposal != "sampled" or self.width > 1 or self.tree):
            raise UserError(
                f"decode.drafts={self.drafts}: chains are drawn side by side; set decode.proposal=sampled "
                "and width=1, without a tree"
            )
        if self.min_confidence and (self.has_siblings or not 0 < self.min_confidence < 1):
            raise UserError(
                f"decode.min_confidence={self.min_confidence}: from 0 to less than 1, and for a single "
                "chain; leave it 0, or set width=1 and drafts=1, without a tree"
            )
        if self.draft_temperature is None:
            return
        if self.draft_temperature < 0 or self.proposal in ("auto", "fixed"):
            raise UserError(
                f"decode.draft_temperature={self.draft_temperature}: must be at least 0, and is for tokens "
                "that are drawn: decode.proposal=sampled or hybrid"
            )

    def _set_tree(self) -> None:
        """Sort the paths; set depth, width and nodes from them."""
        paths = tuple(sorted({tuple(int(r) for r in path) for path in self.tree}, key=lambda p: (len(p), p)))
        prefixes = {(), *paths}
        for path in paths:
            previous = (*path[:-1], path[-1] - 1) if path and path[-1] else path[:-1]
            if not path or min(path) < 0 or path[:-1] not in prefixes or previous not in prefixes:
                raise UserError(f"decode.tree: {list(path)} has no {list(previous)} before it in the tree")
        object.__setattr__(self, "tree", paths)
        object.__setattr__(self, "depth", max(map(len, paths)))
        object.__setattr__(self, "width", 1 + max(map(max, paths)))
        object.__setattr__(self, "nodes", len(paths))

    def _choose_rule(self) -> None:
        if self.rule == "auto":
            object.__setattr__(self, "rule", AUTO_RULES[self.proposal][self.has_siblings])
        if self.rule not in LOSSLESS + LOSSY and self.rule != AUTO_RULES["auto"][0]:
            raise UserError(f"decode.rule={self.rule}: choose one of auto, {', '.join(LOSSLESS + LOSSY)}")
        if (self.rule in LOSSY) != self.lossy:
            raise UserError(
                f"decode.rule={self.rule} changes the target's distribution: set decode.lossy=true"
                if self.rule in LOSSY
                else f"decode.lossy=true, but rule={self.rule} is lossless: choose one of {', '.join(LOSSY)}"
            )

    def _check_rule(self) -> None:
        """Reject a rule that would not be lossless on drafts of this plan."""
        if self.rule == "traversal" and self.proposal == "hybrid" and self.depth and not self.tree:
            raise UserError(
                "decode.rule=traversal verifies one subtree after another, and in a dynamic tree the tokens "
                "drawn in one decide which nodes of another are kept: not lossless. Give decode.tree "
                "(decode=static), or rule=recursive"
            )
        if self.rule in ("token", "block") and (self.has_siblings or self.proposal != "sampled"):
            raise UserError(
                f"decode.rule={self.rule} verifies a chain drawn from distributions q: a fixed token has no "
                "q, and min(1, p/q) would not be lossless. Set width=1 proposal=sampled, or rule=match"
            )
        if self.rule == "kseq" and self.depth and not (self.replacement or self.drafts > 1):
            raise UserError(
                "decode.rule=kseq weighs siblings that were drawn independently: set decode=static "
                "decode.proposal=sampled decode.replacement=true, or decode=drafts; or rule=recursive"
            )
        if self.rule == "select" and self.drafts == 1:
            raise UserError(
                "decode.rule=select keeps the best of several drafts: set decode.drafts=2 or more "
                "(decode=drafts), or rule=match"
            )

    def _check_lossy(self) -> None:
        """Reject a lossy rule on drafts that it does not fit, and numbers out of range."""
        if self.rule == "lenience" and self.depth and self.proposal not in ("sampled", "hybrid"):
            raise UserError(
                "decode.rule=lenience weighs drawn tokens by their q: set decode.proposal=sampled for a "
                "chain or a static tree, or hybrid for a tree"
            )
        if self.rule == "sprint" and self.depth and not self.min_confidence:
            raise UserError(
                "decode.rule=sprint accepts a chain up to where the drafter is not confident: set "
                "decode.min_confidence, such as 0.5"
            )
        if not 0 < self.lenience <= 1:
            raise UserError(f"decode.lenience={self.lenience}: must be above 0 and at most 1")
        if self.accept_top < 1 or not 0 < self.accept_ratio <= 1 or self.rollback < 0:
            raise UserError(
                f"decode: accept_top={self.accept_top} must be at least 1, accept_ratio={self.accept_ratio} "
                f"above 0 and at most 1, rollback={self.rollback} at least 0"
            )
        if self.within and (self.rule != "topk" or len(set(self.within)) != TAGS):
            raise UserError(
                f"decode.within={list(self.within)}: give two different tags, as in [<think>, </think>], and "
                "decode.rule=topk"
            )

    def _check_pace(self) -> None:
        if isinstance(self.adapt, Mapping):
            object.__setattr__(self, "adapt", DepthPolicy.from_config(self.adapt))
        if self.adapt is None:
            return
        if not isinstance(self.adapt, DepthPolicy):
            raise UserError(f"decode.adapt={self.adapt}: give what foredraft advise prints, or null")
        if self.has_siblings or self.lossy or self.adapt.max_depth != self.depth:
            raise UserError(
                "decode.adapt is for a single lossless chain, with a cost for each of 0 to decode.depth="
                f"{self.depth} tokens; leave it out, or set width=1 and drafts=1, without a tree"
            )

    @property
    def has_siblings(self) -> bool:
        """Whether a node may have several children."""
        return self.width > 1 or self.drafts > 1

    def resolved(self, temperature: float, proposals: Sequence[str] = tuple(AUTO_RULES)) -> Plan:
        """The plan with `auto` replaced, as the decoding loop runs it.

        Args:
            temperature: of the target.
            proposals: that the drafter supports.
        """
        if self.proposal != "auto":
            return self
        weighed = self.rule in ("auto", "recursive")  # other rules have no use for a drawn child
        draws = temperature > 0 and self.width > 1 and weighed and "hybrid" in proposals
        return replace(self, proposal="hybrid" if draws else "fixed")

    def proposal_temperature(self, temperature: float) -> float | None:
        """Temperature that draft tokens are drawn at, given the target's; None if none are drawn."""
        assert self.proposal != "auto", "call `resolved` first"
        drafted_at = temperature if self.draft_temperature is None else self.draft_temperature
        # At temperature 0 the fixed children of a hybrid node leave no mass to draw from.
        return (
            None if self.proposal == "fixed" or (self.proposal == "hybrid" and not drafted_at) else drafted_at
        )

    @property
    def name(self) -> str:
        """Name shown in tables."""
        if self.depth == 0:
            return "plain"
        if self.drafts > 1:
            text = f"drafts-{self.drafts}x{self.depth}"
        elif self.width == 1:
            text = f"chain-{self.depth}" + ("-sampled" if self.proposal == "sampled" else "")
        else:
            kind = {"sampled": "sampled-tree", "hybrid": "hybrid"}.get(self.proposal, "tree")
            kind = f"static-{kind}" if self.tree else kind
            text = f"{kind}-{self.nodes} (depth {self.depth}, width {self.width})"
        if self.min_confidence:
            text += f" (confidence {self.min_confidence:g})"
        if self.adapt is not None:
            text += " (adaptive)"
        if self.draft_temperature is not None:
            text += f" drawn at {self.draft_temperature:g}"
        if self.rule != AUTO_RULES[self.proposal][self.has_siblings]:
            text += f" {self.rule}"
        numbers = {
            "typical": [self.alpha, self.threshold],
            "threshold": [self.threshold],
            "lenience": [self.lenience],
            "topk": [self.accept_top, self.accept_ratio],
            "bild": [self.rollback],
        }
        text += "".join(f" {number:g}" for number in numbers.get(self.rule, ()))
        if self.within:
            text += f" within {self.within[0]} {self.within[1]}"
        return f"{text} LOSSY" if self.lossy else text
