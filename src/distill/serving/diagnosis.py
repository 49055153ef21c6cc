"""Why an engine may accept less, or more, of a drafter than the scorecard says: a rule for each report.

Reports that the rules are made from are named beside them (docs/serving.md has the list).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distill.serving.agreement import Comparison
from distill.serving.endpoint import Model
from distill.serving.metrics import COUNTERS

NOTHING = 0.1  # of the scored acceptance: a layer of random weights guesses as well
BROKEN = 0.75  # of it: below, no difference of prompts or rounding explains it
SHORT = 0.95  # of the tokens that every draft should have
OTHERS = 1.1  # times the tokens that were written for us


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known beside the counts.

    Attributes:
        target: of the scorecard, by path or hub id.
        models: that the server lists.
        model: whose counters were read.
        trained: tokens that the drafter was trained to draft; None: it does not say.
        written: tokens of the answers that were asked for; None: the traffic is somebody else's.
        sampled: at a temperature above 0.
    """

    target: str
    models: Sequence[Model]
    model: str
    trained: int | None
    written: int | None
    sampled: bool


def causes(found: Comparison, known: Circumstances) -> list[str]:
    """Likely causes of what differs, the likeliest first; notes alone where nothing does."""
    said = list(_about_the_figures(found, known)) if not found.agrees else []
    return [*said, *_about_the_server(found, known)]


def _about_the_figures(found: Comparison, known: Circumstances) -> Iterator[str]:
    if found.tau.served > found.tau.scored:
        yield from _higher(known)
        return
    if not found.survival:
        yield from _by_tau(found)
        return
    ratio = _ratio(found.survival[0].served, found.survival[0].scored)
    if ratio < NOTHING:
        yield (
            "position 1 is next to never accepted: the drafter guesses. Its weights were not loaded under "
            "the names that the engine looks for (SGLang skips unknown ones in silence: export with its own "
            "to=...; vLLM #8620), or d2t is missing, or it was made for another target"
        )
    elif ratio < BROKEN:
        yield (
            "position 1 is accepted far less: the drafter reads something else than in training. Layer ids "
            "counted the other way (vLLM: the value entering a layer; SGLang: the one leaving it, one "
            "less), hidden states before the final norm instead of behind it, or a wrong d2t"
        )
    elif (place := _collapse(found)) is not None:
        yield (
            f"position 1 is as it should be, and position {place} collapses: what is fed back is wrong. "
            "The hidden state taken before the norm instead of behind it, or the other way (norm_output); "
            "rope_theta, rope_scaling, partial_rotary_factor or max_position_embeddings of another config"
        )
        if known.trained and place > known.trained:
            yield f"the drafter was trained for {known.trained} tokens, and position {place} is past them"
    else:
        yield from _somewhat_lower(known)


def _higher(known: Circumstances) -> Iterator[str]:
    yield (
        "more is accepted than a lossless decoder would: the engine's acceptance is lossy (typical "
        "acceptance, a threshold below 1 such as SGLang's --speculative-accept-threshold-single), so its "
        "text is not the target's; or"
    )
    if known.written is None:
        what = "it answers at a lower temperature, or greedily" if known.sampled else "its prompts are easier"
        yield f"the traffic is not what was scored: {what}; send the held-out prompts (send=true)"
    else:
        yield "it does not answer at the temperature that it is asked for (--override-generation-config)"


def _by_tau(found: Comparison) -> Iterator[str]:
    nothing = found.tau.served - 1 < NOTHING * (found.tau.scored - 1)
    yield (
        "next to nothing is accepted: weights not loaded under the names the engine looks for, no d2t, or "
        "another target (vLLM #8620)"
        if nothing
        else "less is accepted, and this engine does not count positions: layer ids, norms and rope make "
        "such a difference, and so do another temperature, chat template or quantisation"
    )


def _somewhat_lower(known: Circumstances) -> Iterator[str]:
    yield (
        "all positions are somewhat lower: the target is quantised or its KV cache is (FP8, AWQ), or runs "
        "in another dtype; another chat template or system prompt; top_k or top_p, or prompts, that were not "
        "scored"
    )
    if known.written is None:
        yield (
            "the traffic may be of another kind, or at a higher temperature, than what was scored; send "
            "the held-out prompts (send=true)"
        )
    elif known.sampled:
        yield (
            "above temperature 0 an engine may draw its drafts (vLLM's probabilistic draft sampling), which "
            "accepts another share: hold it against such a row with decode=chain-<K>-sampled"
        )


def _about_the_server(found: Comparison, known: Circumstances) -> Iterator[str]:
    names = {_last(name) for model in known.models for name in model if name}
    if known.models and _last(known.target) not in names | {_last(known.model)}:
        listed = ", ".join(f"{m.id}{f' ({m.root})' if m.root else ''}" for m in known.models[:4])
        yield f"the server has {listed}; the scorecard is of {known.target}: is it the same model?"
    served, depth = found.served, len(found.row.acceptance.survival)
    if served.drafted is not None and served.drafted < SHORT * depth * served.rounds:
        yield (
            f"drafts have {served.drafted / served.rounds:.2f} tokens where {depth} were asked for: they end "
            "early (a full context, structured output, an adaptive length), and deep positions look worse"
        )
    if known.trained and depth < known.trained:
        yield (
            f"{depth} tokens are drafted, and the drafter was trained for {known.trained}: more may pay "
            "(num_speculative_tokens, --speculative-num-steps)"
        )
    if known.written is not None and served.tokens > OTHERS * known.written and served.source == COUNTERS:
        yield (
            f"the engine wrote {served.tokens:.0f} tokens meanwhile, {known.written} of them for this: "
            "others use it, and the figures are of both"
        )


def _collapse(found: Comparison) -> int | None:
    """The first position behind the first that is kept far more rarely than it should, given those before."""
    for before, here in zip(found.survival, found.survival[1:], strict=False):
        kept = _ratio(here.served, before.served)
        if here.differs and kept < BROKEN * _ratio(here.scored, before.scored):
            return int(here.name.removeprefix("s_"))
    return None


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def _last(name: str) -> str:
    """Of a path or hub id, for comparing."""
    return name.rstrip("/").rpartition("/")[2].casefold()
