"""What an engine counts of its speculative decoding, read from its metrics: vLLM's and SGLang's.

Names and labels are those of vllm/v1/spec_decode/metrics.py (vLLM's V1 engine) and of SGLang's
metrics collector; `sglang:spec_verify_calls_total` is there since SGLang's pull request 25689 (May 2026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.errors import UserError

PREFIXES = ("vllm:", "sglang:", "process_start_time_seconds")
VLLM = "vllm:spec_decode_num_"
COUNTERS = "counters"  # what figures are read from, where it is not answers or a gauge
GROWING = ("requests", "tokens", "rounds", "drafted", "accepted")  # of a reading
WINDOW = 40  # decode steps behind SGLang's gauge (--decode-log-interval), with one row or more in each


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the counters; all are since the server started.

    Attributes:
        engine: vllm | sglang.
        model: as its metrics call it.
        speculates: speculative decoding is switched on.
        depth: tokens a draft may have; None: not known.
        nodes: that are verified at once, SGLang's root left out; None: not known.
        started: when the process did, in seconds; 0 where it does not say.
        requests: that were answered.
        tokens: that were written.
        rounds: verifications of a row.
        drafted: tokens; None: not counted.
        accepted: of them, likewise.
        kept: rounds that kept the token at each position and all before it; empty: not counted.
        length: SGLang's gauge of tokens a round, over its newest decode steps.
    """

    engine: str
    model: str
    speculates: bool
    depth: int | None
    nodes: int | None
    started: float
    requests: float
    tokens: float
    rounds: float
    drafted: float | None
    accepted: float | None
    kept: tuple[float, ...]
    length: float


@dataclass(frozen=True, slots=True)
class Served:
    """Acceptance between two looks.

    Attributes:
        engine: vllm | sglang.
        rounds: behind the figures.
        drafted: tokens; None: not counted.
        tokens: that were written.
        tau: tokens a round.
        survival: P(accepted >= j), j from 1; empty: the engine does not count positions.
        source: what was read.
    """

    engine: str
    rounds: float
    drafted: float | None
    tokens: float
    tau: float
    survival: tuple[float, ...]
    source: str


Sample = tuple[str, dict[str, str], float]


def read(text: str, where: str, model: str | None = None) -> Reading:
    """The counters in a page of metrics.

    Args:
        text: of the page.
        where: it was found, for errors.
        model: whose counters, where there are several.

    Raises:
        UserError: not a page of vLLM or SGLang, or of several models.
    """
    samples = _samples(text, where)
    engines = sorted({name.partition(":")[0] for name, _, _ in samples} & {"vllm", "sglang"})
    if len(engines) != 1:
        what = "both vLLM and SGLang" if engines else "neither vLLM nor SGLang"
        raise UserError(
            f"{where}: metrics of {what}; give the address of one engine itself, whose metrics are switched "
            "on (vLLM: without --disable-log-stats; SGLang: --enable-metrics)"
        )
    names = {labels["model_name"] for _, labels, _ in samples if "model_name" in labels}
    if model is None and len(names) > 1:
        raise UserError(f"{where}: counts {', '.join(sorted(names))}; choose one with model=<name>")
    if model is not None and names and model not in names:
        raise UserError(f"model={model}: {where} counts {', '.join(sorted(names))}")
    mine = [s for s in samples if model is None or s[1].get("model_name", model) == model]
    name = model or next(iter(names), "")
    return (_vllm if engines == ["vllm"] else _sglang)(mine, name)


def _samples(text: str, where: str) -> list[Sample]:
    """Name without `_total`, labels, value; of lines that matter here."""
    lines = [line for line in text.splitlines() if line.startswith(PREFIXES)]
    try:
        families = list(parser()("\n".join(lines) + "\n"))
    except (ValueError, IndexError) as error:
        raise UserError(f"{where}: metrics that make no sense ({str(error)[:120]})") from None
    found = [
        (sample.name.removesuffix("_total"), dict(sample.labels), float(sample.value))
        for family in families
        for sample in family.samples
    ]
    if any(not math.isfinite(value) for name, _, value in found if "spec_" in name):
        raise UserError(f"{where}: metrics that make no sense (an acceptance counter is not finite)")
    return found


def parser() -> Any:
    """Of Prometheus' own library, which only those need who read metrics."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UserError(
            "reading metrics: the package prometheus_client is missing; pip install -e '.[serving]'"
        ) from None
    return text_string_to_metric_families


def _sum(samples: Sequence[Sample], name: str) -> float:
    """Over an engine's replicas (label `engine`) and whatever else it tells apart."""
    return sum((value for found, _, value in samples if found == name), 0.0)


def _most(samples: Sequence[Sample], name: str) -> float:
    """Of a gauge that every rank repeats."""
    return max((value for found, _, value in samples if found == name), default=0.0)


def _vllm(samples: Sequence[Sample], model: str) -> Reading:
    kept: dict[int, float] = {}
    for name, labels, value in samples:
        if name == f"{VLLM}accepted_tokens_per_pos" and labels.get("position", "").isdigit():
            place = int(labels["position"])
            kept[place] = kept.get(place, 0.0) + value
    names = {name for name, _, _ in samples}
    if f"{VLLM}drafts" not in names and f"{VLLM}draft_tokens" in names:
        raise UserError("vLLM's V0 engine counts no rounds, so its acceptance cannot be told; serve with V1")
    by_position = tuple(kept.get(place, 0.0) for place in range(max(kept, default=-1) + 1))  # (K,)
    return Reading(
        engine="vllm",
        model=model,
        # vLLM makes these counters where it has a speculative config, and nowhere else.
        speculates=f"{VLLM}drafts" in names,
        depth=len(by_position) or None,
        nodes=len(by_position) or None,
        started=_most(samples, "process_start_time_seconds"),
        requests=_sum(samples, "vllm:request_success"),
        tokens=_sum(samples, "vllm:generation_tokens"),
        rounds=_sum(samples, f"{VLLM}drafts"),
        drafted=_sum(samples, f"{VLLM}draft_tokens"),
        accepted=_sum(samples, f"{VLLM}accepted_tokens"),
        kept=by_position,
        length=0.0,
    )


def _sglang(samples: Sequence[Sample], model: str) -> Reading:
    rounds, length = _sum(samples, "sglang:spec_verify_calls"), _most(samples, "sglang:spec_accept_length")
    steps = int(_most(samples, "sglang:spec_num_steps"))
    # With the root, which is why 2 steps and 2 of these draft a single token (SGLang #8228).
    nodes = max(int(_most(samples, "sglang:spec_num_draft_tokens")) - 1, 0)
    return Reading(
        engine="sglang",
        model=model,
        # Its gauges are always there, and 0 before the first draft or without any.
        speculates=bool(rounds or length or steps),
        depth=min(steps, nodes or steps) or None,
        nodes=nodes or None,
        started=_most(samples, "process_start_time_seconds"),
        requests=_sum(samples, "sglang:num_requests"),
        tokens=_sum(samples, "sglang:generation_tokens"),
        rounds=rounds,
        drafted=None,
        accepted=None,
        kept=(),
        length=length,
    )


def since(before: Reading, after: Reading, where: str) -> Reading:
    """What was counted between two readings of one server.

    Raises:
        UserError: it was started anew in between, or is another one.
    """
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in GROWING}
    counted = {name: pair for name, pair in pairs.items() if None not in pair}
    same = (before.engine, before.started, len(before.kept)) == (after.engine, after.started, len(after.kept))
    positions = list(zip(before.kept, after.kept, strict=False))
    if not same or any(late < early for early, late in [*counted.values(), *positions]):
        raise UserError(
            f"{where}: was started anew between the two readings, or several servers answer there in turn; "
            "run this again, at the address of one engine"
        )
    grown: dict[str, Any] = {name: late - early for name, (early, late) in counted.items()}
    return replace(after, **grown, kept=tuple(late - early for early, late in positions))


def served(reading: Reading, histograms: Sequence[Sequence[int]] = ()) -> Served:
    """Acceptance in what was counted.

    Args:
        reading: since the start, or between two readings.
        histograms: of single answers: rounds that kept 0, 1, ... tokens.
    """
    if histograms:
        depth = max(map(len, histograms)) - 1
        ended = [sum(h[n] for h in histograms if n < len(h)) for n in range(depth + 1)]
        kept = [float(sum(ended[j:])) for j in range(1, depth + 1)]
        return _served(reading, float(sum(ended)), sum(kept), kept, "the answers' own histograms")
    if reading.engine == "vllm":
        accepted = reading.accepted or 0.0
        return _served(reading, reading.rounds, accepted, reading.kept, COUNTERS)
    if not reading.rounds and reading.length and reading.tokens:
        source = f"a gauge of the newest decode steps, taken for {WINDOW} rounds"
        return _served(reading, float(WINDOW), WINDOW * (reading.length - 1), (), source)
    # An answer's first token is the prefill's, and every round adds one of the target's.
    accepted = max(reading.tokens - reading.requests - reading.rounds, 0.0)
    return _served(reading, reading.rounds, accepted, (), COUNTERS)


def _served(reading: Reading, rounds: float, accepted: float, kept: Sequence[float], source: str) -> Served:
    per = max(rounds, 1.0)
    survival = tuple(count / per for count in kept)
    return Served(
        reading.engine, rounds, reading.drafted, reading.tokens, 1 + accepted / per, survival, source
    )
