"""Parse the speculative-decoding metrics of vLLM and SGLang.

Names and labels are from vllm/v1/spec_decode/metrics.py (vLLM's V1 engine) and SGLang's metrics collector
(`sglang:spec_verify_calls_total` was added by SGLang's pull request 25689).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.errors import UserError

PREFIXES = ("vllm:", "sglang:", "process_start_time_seconds")
VLLM = "vllm:spec_decode_num_"
COUNTERS = "counters"  # source of figures, unless answers or a gauge
COUNTER_FIELDS = (  # monotonic fields of `Reading`
    *("requests", "tokens", "rounds", "drafted", "accepted"),
    *("prompt_tokens", "prefill_seconds", "decode_seconds"),
)
WINDOW = 40  # decode steps averaged by SGLang's gauge (--decode-log-interval)


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of a server since its start.

    Attributes:
        engine: vllm | sglang.
        model: name in its metrics.
        speculates: speculative decoding is switched on.
        depth: maximum draft length; None: unknown.
        nodes: draft tokens verified at once, without SGLang's root; None: unknown.
        started: start time of the process in seconds; 0 if unknown.
        requests: answered requests.
        tokens: generated tokens.
        rounds: verification rounds of a row.
        drafted: draft tokens; None: not counted.
        accepted: accepted draft tokens; None: not counted.
        accepted_at: rounds that accepted the token at each position and all before it; empty: not counted.
        length: SGLang's gauge of tokens per round over its latest decode steps.
        prompt_tokens: tokens of the answered prompts; None: not counted.
        prefill_seconds: from the start of each request to its first token, summed; None: not counted.
        decode_seconds: from the first token of each answer to its last, summed; None: not counted.
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
    accepted_at: tuple[float, ...]
    length: float
    prompt_tokens: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ServedAcceptance:
    """Acceptance between two readings.

    Attributes:
        engine: vllm | sglang.
        rounds: number of rounds.
        drafted: draft tokens; None: not counted.
        tokens: generated tokens.
        tau: tokens per round.
        survival: P(accepted >= j), j from 1; empty: the engine does not count positions.
        source: source of the figures.
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
    """Parse a page of metrics.

    Raises:
        UserError: not metrics of vLLM or SGLang, or of several models.
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
    selected = [s for s in samples if model is None or s[1].get("model_name", model) == model]
    name = model or next(iter(names), "")
    return (_vllm if engines == ["vllm"] else _sglang)(selected, name)


def _samples(text: str, where: str) -> list[Sample]:
    """(name without `_total`, labels, value) of the relevant lines."""
    lines = [line for line in text.splitlines() if line.startswith(PREFIXES)]
    try:
        families = list(parser()("\n".join(lines) + "\n"))
    except (ValueError, IndexError) as error:
        raise UserError(f"{where}: invalid metrics ({str(error)[:120]})") from None
    parsed = [
        (sample.name.removesuffix("_total"), dict(sample.labels), float(sample.value))
        for family in families
        for sample in family.samples
    ]
    if any(not math.isfinite(value) for name, _, value in parsed if "spec_" in name):
        raise UserError(f"{where}: invalid metrics (an acceptance counter is not finite)")
    return parsed


def parser() -> Any:
    """The parser of prometheus_client, an optional dependency."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UserError(
            "reading metrics: the package prometheus_client is missing; pip install 'foredraft[serving]'"
        ) from None
    return text_string_to_metric_families


def _sum(samples: Sequence[Sample], name: str) -> float:
    """Sum of a counter over replicas (label `engine`) and other labels."""
    return sum((value for sample, _, value in samples if sample == name), 0.0)


def _max(samples: Sequence[Sample], name: str) -> float:
    """Maximum of a gauge that every rank reports."""
    return max((value for sample, _, value in samples if sample == name), default=0.0)


def _vllm(samples: Sequence[Sample], model: str) -> Reading:
    accepted_counts: dict[int, float] = {}
    for name, labels, value in samples:
        if name == f"{VLLM}accepted_tokens_per_pos" and labels.get("position", "").isdigit():
            place = int(labels["position"])
            accepted_counts[place] = accepted_counts.get(place, 0.0) + value
    names = {name for name, _, _ in samples}
    if f"{VLLM}drafts" not in names and f"{VLLM}draft_tokens" in names:
        raise UserError("vLLM's V0 engine counts no rounds, so its acceptance is unknown; serve with V1")
    by_position = tuple(
        accepted_counts.get(place, 0.0) for place in range(max(accepted_counts, default=-1) + 1)
    )  # (K,)
    return Reading(
        engine="vllm",
        model=model,
        # vLLM exports these counters only with a speculative config.
        speculates=f"{VLLM}drafts" in names,
        depth=len(by_position) or None,
        nodes=len(by_position) or None,
        started=_max(samples, "process_start_time_seconds"),
        requests=_sum(samples, "vllm:request_success"),
        tokens=_sum(samples, "vllm:generation_tokens"),
        rounds=_sum(samples, f"{VLLM}drafts"),
        drafted=_sum(samples, f"{VLLM}draft_tokens"),
        accepted=_sum(samples, f"{VLLM}accepted_tokens"),
        accepted_at=by_position,
        length=0.0,
        prompt_tokens=_sum(samples, "vllm:prompt_tokens"),
        prefill_seconds=_sum(samples, "vllm:request_prefill_time_seconds_sum"),
        decode_seconds=_sum(samples, "vllm:request_decode_time_seconds_sum"),
    )


def _sglang(samples: Sequence[Sample], model: str) -> Reading:
    rounds, length = _sum(samples, "sglang:spec_verify_calls"), _max(samples, "sglang:spec_accept_length")
    steps = int(_max(samples, "sglang:spec_num_steps"))
    # Counts the root, so 2 steps with 2 draft tokens draft a single token (SGLang #8228).
    nodes = max(int(_max(samples, "sglang:spec_num_draft_tokens")) - 1, 0)
    return Reading(
        engine="sglang",
        model=model,
        # Its gauges always exist, and are 0 without speculation or before the first draft.
        speculates=bool(rounds or length or steps),
        depth=min(steps, nodes or steps) or None,
        nodes=nodes or None,
        started=_max(samples, "process_start_time_seconds"),
        requests=_sum(samples, "sglang:num_requests"),
        tokens=_sum(samples, "sglang:generation_tokens"),
        rounds=rounds,
        drafted=None,
        accepted=None,
        accepted_at=(),
        length=length,
    )


def difference(before: Reading, after: Reading, where: str) -> Reading:
    """Subtract two readings of one server.

    Raises:
        UserError: the server was restarted in between, or is another one.
    """
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in COUNTER_FIELDS}
    counted = {name: pair for name, pair in pairs.items() if None not in pair}
    same = (before.engine, before.started, len(before.accepted_at)) == (
        after.engine,
        after.started,
        len(after.accepted_at),
    )
    positions = list(zip(before.accepted_at, after.accepted_at, strict=False))
    if not same or any(late < early for early, late in [*counted.values(), *positions]):
        raise UserError(
            f"{where}: the server was restarted between the two readings, or servers share this address; "
            "run this again with the address of one engine"
        )
    grown: dict[str, Any] = {name: late - early for name, (early, late) in counted.items()}
    return replace(after, **grown, accepted_at=tuple(late - early for early, late in positions))


def served_acceptance(reading: Reading, histograms: Sequence[Sequence[int]] = ()) -> ServedAcceptance:
    """Compute acceptance from counters.

    Args:
        reading: counters since the start, or between two readings.
        histograms: for each answer, rounds that accepted 0, 1, ... tokens.
    """
    if histograms:
        depth = max(map(len, histograms)) - 1
        ended = [sum(h[n] for h in histograms if n < len(h)) for n in range(depth + 1)]
        accepted_counts = [float(sum(ended[j:])) for j in range(1, depth + 1)]
        return _acceptance(
            reading, float(sum(ended)), sum(accepted_counts), accepted_counts, "the answers' own histograms"
        )
    if reading.engine == "vllm":
        accepted = reading.accepted or 0.0
        return _acceptance(reading, reading.rounds, accepted, reading.accepted_at, COUNTERS)
    if not reading.rounds and reading.length and reading.tokens:
        source = f"a gauge of the newest decode steps, taken for {WINDOW} rounds"
        return _acceptance(reading, float(WINDOW), WINDOW * (reading.length - 1), (), source)
    # The prefill gives an answer's first token, and every round adds one token of the target.
    accepted = max(reading.tokens - reading.requests - reading.rounds, 0.0)
    return _acceptance(reading, reading.rounds, accepted, (), COUNTERS)


def _acceptance(
    reading: Reading, rounds: float, accepted: float, accepted_counts: Sequence[float], source: str
) -> ServedAcceptance:
    per = max(rounds, 1.0)
    survival = tuple(count / per for count in accepted_counts)
    return ServedAcceptance(
        reading.engine, rounds, reading.drafted, reading.tokens, 1 + accepted / per, survival, source
    )
