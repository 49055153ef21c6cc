"""What tests of the verification rules share: samplers, plans, and stories of drafts."""

from __future__ import annotations

from exact import Node, Script, Story, Table

from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.rule import rule_class, rule_names

V = 3
RULES = {name: rule_class(name) for name in rule_names()}
LOSSY = tuple(name for name, rule in RULES.items() if rule.lossy)
ONE = Sampler(1.0)
SAMPLERS = {"0.5": Sampler(0.5), "1": ONE, "warped": Sampler(0.7, top_k=2), "greedy": Sampler(0.0)}
SAMPLERS |= {"penalty": Sampler(0.5, repetition_penalty=1.6)}
SAMPLERS |= {"greedy, penalty": Sampler(0.0, repetition_penalty=3.0)}
CHAINS = ("token", "block")


def plan_of(rule: str) -> Plan:
    """A plan that allows a rule; its shape means nothing to the rules."""
    several = rule in ("select", "kseq")
    proposal = "sampled" if several or rule in (*CHAINS, "lenience") else "fixed"
    flags = {"lossy": rule in LOSSY, "min_confidence": 0.5 * (rule == "sprint")}
    return Plan(depth=1, proposal=proposal, drafts=1 + several, rule=rule, **flags)


def told(story: Story, seed: int) -> list[Node]:
    """One outcome of a story."""
    tape = Script(seed)
    try:
        weights = next(story)
        while True:
            weights = story.send(tape.choose([w / sum(weights) for w in weights]))
    except StopIteration as end:
        return end.value


def sampled_chain(table: Table, depth: int, zeros: float = 0.3) -> Story:
    path: tuple[int, ...] = ()
    nodes = []
    for parent in range(-1, depth - 1):
        probs = table.q(path, zeros)
        path = (*path, (yield probs))
        nodes.append(Node(path[-1], parent, probs))
    return nodes
