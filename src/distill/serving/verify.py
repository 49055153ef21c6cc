"""foredraft verify-served: compare acceptance counted by a serving engine with a scorecard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.config.build import quiet
from distill.config.validate import check_address
from distill.options.commands import VerifyOptions
from distill.scoring.compare import scorecard
from distill.scoring.tables import grid
from distill.serving.agreement import Comparison, chain_row, compare, same_prompts
from distill.serving.diagnosis import ServerFacts, causes
from distill.serving.endpoint import Endpoint
from distill.serving.metrics import Reading, served_acceptance
from distill.serving.traffic import MORE, Traffic, measure
from distill.utils.progress import say

FLAGS = {
    "vllm": "vllm serve <target> --speculative-config '{...}'",
    "sglang": "python -m sglang.launch_server ... --speculative-algorithm ...",
}


def command(options: VerifyOptions) -> float:
    """Return the exit code: 0: acceptance agrees with the scorecard; 1: it differs; 2: not comparable."""
    if not verify(options):
        raise SystemExit(1)
    return 0.0


def verify(options: VerifyOptions) -> bool:
    """Print served and scored acceptance and likely causes of a difference; returns whether they agree.

    Raises:
        UserError: no scorecard, no engine, no matching row, or too few rounds.
    """
    quiet()
    check_address(options.url, options.api_key_env, "", "")
    card = scorecard(Path(options.checkpoint))
    endpoint = Endpoint(options.url, options.timeout, options.api_key_env)
    first, models = endpoint.reading(options.model), endpoint.models()
    if first.engine == "vllm" and not first.speculates:
        return _report_off(first)
    _check_chain(first, endpoint)
    temperature = card.rows[0].temperature if options.temperature is None else options.temperature
    if depth := first.depth or options.depth:  # otherwise the answers show it
        _matching_row(options, card, first, depth, temperature)
    traffic = measure(options, card, endpoint, first, models, temperature)
    reading = traffic.reading
    if not reading.speculates:
        return _report_off(reading)
    _check_chain(reading, endpoint)
    acceptance = served_acceptance(reading, traffic.histograms)
    if not acceptance.rounds:
        return _report_idle(endpoint, traffic)
    depth = reading.depth or options.depth or len(acceptance.survival)
    if not depth:
        raise UserError(
            f"{endpoint.url}: does not say how many tokens it drafts; give depth=<--speculative-num-steps>"
        )
    row = _matching_row(options, card, reading, depth, temperature)
    same = same_prompts(card, row, traffic.digest)
    result = compare(acceptance, row, options.tolerance, same)
    facts = ServerFacts(
        target=card.checkpoint.target,
        models=models,
        model=reading.model,
        trained=_trained_depth(Path(options.checkpoint)),
        written=traffic.answer_tokens,
        sampled=temperature > 0,
    )
    if same:
        traffic = traffic._replace(description=f"the scorecard's own {traffic.description}")
    return _report(result, causes(result, facts), traffic, endpoint, card)


def _matching_row(
    options: VerifyOptions, card: Scorecard, reading: Reading, depth: int, temperature: float
) -> Row:
    if reading.depth and options.depth and reading.depth != options.depth:
        raise UserError(
            f"depth={options.depth}, but the engine counts drafts of {reading.depth} tokens; leave it out"
        )
    return chain_row(card, options.checkpoint, depth, temperature, options.row)


def _check_chain(reading: Reading, endpoint: Endpoint) -> None:
    if reading.nodes and reading.depth and reading.nodes > reading.depth:
        raise UserError(
            f"{endpoint.url}: verifies trees of {reading.nodes} tokens, not comparable with a chain; "
            "serve it with --speculative-eagle-topk 1"
        )


def _trained_depth(checkpoint: Path) -> int | None:
    """Depth that the drafter was trained for, from its config.json; None if unknown."""
    for folder in (checkpoint, checkpoint / "checkpoints" / "best", checkpoint.parent):
        try:
            depth = json.loads((folder / "config.json").read_text())["settings"]["depth"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return depth if isinstance(depth, int) else None
    return None


def _report_off(reading: Reading) -> bool:
    say(
        f"{reading.engine}: no acceptance is counted: speculative decoding is off, or was dropped when the "
        f"server started (its log says why). Start it with: {FLAGS[reading.engine]}"
    )
    return False


def _report_idle(endpoint: Endpoint, traffic: Traffic) -> bool:
    if traffic.answer_tokens is None:
        raise UserError(
            f"{endpoint.url}: nothing was drafted in what was watched ({traffic.description}); send prompts "
            "(send=true), or wait longer (seconds=)"
        )
    say(
        f"{traffic.description}, and nothing was drafted: the engine does not use its drafter. Batches "
        "above its limit (disable_by_batch_size), a full context, or requests that it never drafts for"
    )
    return False


def _more(traffic: Traffic) -> str:
    """What gives more rounds."""
    if not traffic.prompts:
        return "watch longer (seconds=), or send prompts (send=true)"
    if traffic.prompts < traffic.available:
        return f"raise count= above {traffic.prompts}; there are {traffic.available} held-out prompts"
    return f"all {traffic.available} held-out prompts were sent; {MORE}"


def _report(
    comparison: Comparison, reasons: Sequence[str], traffic: Traffic, endpoint: Endpoint, card: Scorecard
) -> bool:
    row, served = comparison.row, comparison.served
    drafted = "" if served.drafted is None else f", {served.drafted:.0f} draft tokens"
    lines = [
        [
            figure.name,
            f"{figure.served:.3f}",
            f"{figure.scored:.3f}",
            f"{figure.served - figure.scored:+.3f}",
            f"{figure.noise:.3f}",
            "differs" if figure.differs else "",
        ]
        for figure in (comparison.tau, *comparison.survival)
    ]
    say(
        f"{served.engine} at {endpoint.url}: {traffic.reading.model}\n"
        f"scorecard: step {card.checkpoint.step}, {row.decode}, T={row.temperature:g}, "
        f"batch {row.batch_size}, {row.replay.method if row.replay else 'counted by the decoder'}\n"
        f"counted: {traffic.description}; {served.rounds:.0f} rounds{drafted}, from {served.source}\n"
        + grid(["", "served", "scored", "difference", "noise", ""], lines)
        + "\nnoise: largest difference by chance for the same drafter, at 99 % over all lines"
    )
    if comparison.agrees and comparison.inconclusive:
        raise UserError(
            f"{served.rounds:.0f} rounds are too few to tell whether it is the same drafter; {_more(traffic)}"
        )
    say("agrees with the scorecard" if comparison.agrees else "DIFFERS from the scorecard; likely causes:")
    for reason in reasons:
        say(f"  - {reason}")
    return comparison.agrees
