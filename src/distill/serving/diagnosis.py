"""Likely causes of acceptance that differs from the scorecard: one rule per known report.

docs/serving.md lists the reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distill.serving.agreement import Comparison
from distill.serving.endpoint import Model
from distill.serving.metrics import COUNTERS

RANDOM_DRAFTER = 0.1  # share of the scored acceptance that a random layer can reach
BROKEN_INPUT = 0.75  # share of it below which prompts or rounding cannot explain the loss
SHORT_DRAFTS = 0.95  # share of the requested draft length
OTHER_TRAFFIC = 1.1  # ratio of counted tokens to tokens of our answers
CPU_DRAWS = (
    "on a CPU vLLM (0.32) verifies drafts above temperature 0 with temperatures that nothing wrote: it "
    "accepts less, and its texts are not the target's; serve temperature 0, or on a GPU (docs/engines.md)"
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about the server and the measurement, without the counters.

    Attributes:
        target: target of the scorecard, by path or hub id.
        models: models that the server lists.
        model: name in the counters.
        trained: depth that the drafter was trained for; None: unknown.
        written: tokens of the answers to our requests; None: other users' traffic.
        sampled: the temperature is above 0.
    """

    target: str
    models: Sequence[Model]
    model: str
    trained: int | None
    written: int | None
    sampled: bool


def causes(comparison: Comparison, facts: ServerFacts) -> list[str]:
    """List likely causes of a difference, sorted by likelihood, and notes about the server."""
    reasons = list(_figure_causes(comparison, facts)) if not comparison.agrees else []
    return [*reasons, *_server_notes(comparison, facts)]


def _figure_causes(comparison: Comparison, facts: ServerFacts) -> Iterator[str]:
    if comparison.tau.served > comparison.tau.scored:
        yield from _higher(facts)
        return
    if not comparison.survival:
        yield from _lower_tau(comparison)
        return
    ratio = _ratio(comparison.survival[0].served, comparison.survival[0].scored)
    if ratio < RANDOM_DRAFTER:
        yield (
            "position 1 is almost never accepted, as with random weights. Its weights were not loaded under "
            "the names that the engine looks for (SGLang skips unknown ones in silence: export with its own "
            "to=...; vLLM #8620), or d2t is missing, or it was made for another target"
        )
    elif ratio < BROKEN_INPUT:
        yield (
            "position 1 is accepted far less: the drafter reads other inputs than in training. Layer ids "
            "counted the other way (vLLM: the value entering a layer; SGLang: the one leaving it, one "
            "less), hidden states before the final norm instead of behind it, or a wrong d2t"
        )
    elif (position := _collapsed_position(comparison)) is not None:
        yield (
            f"position 1 is as scored, and position {position} collapses: the fed-back input is wrong. "
            "The hidden state taken before the norm instead of behind it, or the other way (norm_output); "
            "rope_theta, rope_scaling, partial_rotary_factor or max_position_embeddings of another config"
        )
        if facts.trained and position > facts.trained:
            yield f"the drafter was trained for {facts.trained} tokens, and position {position} is past them"
    else:
        yield from _somewhat_lower(facts)
        return
    if facts.sampled:
        yield CPU_DRAWS


def _higher(facts: ServerFacts) -> Iterator[str]:
    yield (
        "more is accepted than a lossless decoder accepts: the engine's acceptance is lossy (typical "
        "acceptance, a threshold below 1 such as SGLang's --speculative-accept-threshold-single), so its "
        "text is not the target's; or"
    )
    if facts.written is None:
        what = "it answers at a lower temperature, or greedily" if facts.sampled else "its prompts are easier"
        yield f"the traffic is not what was scored: {what}; send the held-out prompts (send=true)"
    else:
        yield "it does not answer at the temperature that it is asked for (--override-generation-config)"


def _lower_tau(comparison: Comparison) -> Iterator[str]:
    nothing = comparison.tau.served - 1 < RANDOM_DRAFTER * (comparison.tau.scored - 1)
    yield (
        "almost nothing is accepted: weights not loaded under the names the engine looks for, no d2t, or "
        "another target (vLLM #8620)"
        if nothing
        else "less is accepted, and this engine does not count positions: layer ids, norms and rope make "
        "such a difference, and so do another temperature, chat template or quantisation"
    )


def _somewhat_lower(facts: ServerFacts) -> Iterator[str]:
    yield (
        "all positions are somewhat lower: the target is quantised or its KV cache is (FP8, AWQ), or runs "
        "in another dtype; another chat template or system prompt; top_k or top_p, or prompts, that were not "
        "scored"
    )
    if facts.written is None:
        yield (
            "the traffic may be of another kind, or at a higher temperature, than what was scored; send "
            "the held-out prompts (send=true)"
        )
    elif facts.sampled:
        yield (
            "above temperature 0 an engine may sample drafts (vLLM's probabilistic draft sampling), which "
            "changes acceptance: compare it with a row of sampled drafts by row=chain-<K>-sampled"
        )


def _server_notes(comparison: Comparison, facts: ServerFacts) -> Iterator[str]:
    names = {_last(name) for model in facts.models for name in model if name}
    if facts.models and _last(facts.target) not in names | {_last(facts.model)}:
        listed = ", ".join(f"{m.id}{f' ({m.root})' if m.root else ''}" for m in facts.models[:4])
        yield f"the server has {listed}; the scorecard is of {facts.target}: is it the same model?"
    served, depth = comparison.served, len(comparison.row.acceptance.survival)
    if served.drafted is not None and served.drafted < SHORT_DRAFTS * depth * served.rounds:
        yield (
            f"drafts have {served.drafted / served.rounds:.2f} tokens where {depth} were asked for: they end "
            "early (a full context, structured output, an adaptive length), and deep positions look worse"
        )
    if facts.trained and depth < facts.trained:
        yield (
            f"{depth} tokens are drafted, and the drafter was trained for {facts.trained}: more may pay "
            "(num_speculative_tokens, --speculative-num-steps)"
        )
    if (
        facts.written is not None
        and served.tokens > OTHER_TRAFFIC * facts.written
        and served.source == COUNTERS
    ):
        yield (
            f"the engine wrote {served.tokens:.0f} tokens meanwhile, {facts.written} of them for this: "
            "others use it, and the figures include their traffic"
        )


def _collapsed_position(comparison: Comparison) -> int | None:
    """First position after 1 with a conditional acceptance far below the scored one."""
    for before, here in zip(comparison.survival, comparison.survival[1:], strict=False):
        conditional = _ratio(here.served, before.served)
        if here.differs and conditional < BROKEN_INPUT * _ratio(here.scored, before.scored):
            return int(here.name.removeprefix("s_"))
    return None


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def _last(name: str) -> str:
    """Last part of a path or hub id, for comparison."""
    return name.rstrip("/").rpartition("/")[2].casefold()
