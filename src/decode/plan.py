"""Plan of decoding: shape of a draft, source of its tokens, and verification rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.integers import finite_number, whole_number
from decode.verification.rule import Auto, Rule, rule_class, rule_names, rule_of

Path = tuple[int, ...]  # child ranks from the root to a node
# proposal -> the rule that `auto` selects for a chain, and for a tree
AUTO_RULES = {
    "auto": ("auto", "auto"),  # until `resolved`
    "fixed": ("match", "match"),
    "sampled": ("token", "recursive"),
    "hybrid": ("recursive", "recursive"),
}
# Numbers of rules that were settings of plans: old name -> the rule, and the name there.
MOVED = {
    "threshold": ("typical", "threshold"),
    "alpha": ("typical", "alpha"),
    "lenience": ("lenience", "factor"),
    "accept_top": ("topk", "top"),
    "accept_ratio": ("topk", "ratio"),
    "within": ("topk", "within"),
    "rollback": ("bild", "rollback"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of a draft, source of its tokens, and the rule that verifies it.

    Args:
        depth: levels below the root, in tokens; 0 is plain decoding.
        width: number of nodes expanded per level, and of children of each (EAGLE-2, arXiv:2406.16858); 1 is
            a chain.
        nodes: number of verified nodes, the best by draft probability; 0 means `depth`.
        proposal: `fixed` takes the most likely tokens; `sampled` draws them; `hybrid` gives a node the most
            likely tokens as children and one child drawn from the rest of the distribution. `auto` is fixed
            at temperature 0; above it a tree is hybrid and a chain sampled, see `resolved`.
        drafts: number of parallel chains (SpecDiff-2, arXiv:2511.00606), of `depth` tokens each.
        draft_temperature: temperature for drawing draft tokens; None: the sampler's.
        min_confidence: end a row's chain before the product of its levels' confidences falls below
            this (SpecDec++, arXiv:2405.19715). Confidences depend on q, never on drawn tokens.
        rule: verification rule: a `Rule`, its name, or a mapping of name and numbers. `auto` is `match` for
            fixed drafts, `token` for a sampled chain and `recursive` otherwise.
        tree: a static tree (Medusa, arXiv:2401.10774): the path of child ranks to each node, instead
            of depth, width and nodes. Rank 0 is the most likely child, or the drawn one.
        replacement: draw siblings with replacement.
        lossy: allow rules that change the target's distribution.
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
    rule: Rule = field(default_factory=Auto)
    tree: tuple[Path, ...] = ()
    replacement: bool = False
    lossy: bool = False
    adapt: DepthPolicy | None = None

    def __post_init__(self) -> None:
        self._check_types()
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
        self.rule.check(self)
        self._check_adapt()

    def _check_types(self) -> None:
        """Check the types of settings, which may be those of a file or a command line."""
        for name in ("depth", "width", "nodes", "drafts"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"decode.{name}"))
        finite_number(self.min_confidence, "decode.min_confidence")
        if self.draft_temperature is not None:
            finite_number(self.draft_temperature, "decode.draft_temperature")
        for name in ("replacement", "lossy"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"decode.{name}={value!r}: give true or false")
        if not isinstance(self.proposal, str) or self.proposal not in AUTO_RULES:
            raise UserError(f"decode.proposal={self.proposal}: choose one of {', '.join(AUTO_RULES)}")
        if not _is_list(self.tree) or not all(map(_is_list, self.tree)):
            raise UserError(f"decode.tree={self.tree!r:.80}: give a list of paths, as in [[0], [1], [0, 0]]")
        paths = tuple(tuple(whole_number(r, "decode.tree, a rank") for r in path) for path in self.tree)
        object.__setattr__(self, "tree", paths)  # hashable

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
        paths = tuple(sorted(set(self.tree), key=lambda path: (len(path), path)))
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
        rule = rule_of(self.rule)
        if isinstance(rule, Auto):
            rule = rule_of(self._auto_rule)
        object.__setattr__(self, "rule", rule)
        if rule.lossy and not self.lossy:
            raise UserError(
                f"decode.rule={rule.name} changes the target's distribution: set decode.lossy=true"
            )
        if self.lossy and not rule.lossy:
            lossy = ", ".join(name for name in rule_names() if rule_class(name).lossy)
            raise UserError(f"decode.lossy=true, but rule={rule.name} is lossless: choose one of {lossy}")

    def _check_adapt(self) -> None:
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
            proposals: supported by the drafter.
        """
        if self.proposal != "auto":
            return self
        drawn = "hybrid" if self.width > 1 else "sampled"
        uses = self.rule.uses_drawn_child if self.width > 1 else self.rule.reads_probs
        draws = temperature > 0 and self.depth > 0 and uses and drawn in proposals
        return replace(self, proposal=drawn if draws else "fixed")

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """The plan with texts in its rule replaced by token ids.

        Raises:
            UserError: a text is not one token.
        """
        return replace(self, rule=self.rule.for_tokenizer(tokenizer))

    def proposal_temperature(self, temperature: float) -> float | None:
        """Temperature for drawing draft tokens, given the target's; None if none are drawn."""
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
        if self.rule.name != self._auto_rule:
            text += f" {self.rule.title}"
        return f"{text} LOSSY" if self.lossy else text

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values of all fields, as JSON has them and `plan_of` reads them."""
        adapt = None if self.adapt is None else self.adapt.settings
        plain = {"rule": self.rule.settings, "adapt": adapt, "tree": [list(path) for path in self.tree]}
        return asdict(self) | plain

    @property
    def _auto_rule(self) -> str:
        return AUTO_RULES[self.proposal][self.has_siblings]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """Build a plan from plain values.

    Raises:
        UserError: no mapping, an unknown setting, or an invalid plan.
    """
    if not isinstance(settings, Mapping):
        raise UserError(f"decode: {settings!r:.80} is no plan; give a mapping, as in {{depth: 3}}")
    known = {one.name for one in fields(Plan)}
    for name in settings:
        if name in MOVED:
            rule, number = MOVED[name]
            raise UserError(f"decode.{name} belongs to its rule: rule: {{name: {rule}, {number}: ...}}")
        if name not in known:
            raise UserError(f"decode.{name}: no setting of a plan; choose one of {', '.join(sorted(known))}")
    return Plan(**settings)
