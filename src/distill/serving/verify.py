"""foredraft verify-served: is the drafter that an engine serves the one that was scored?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.scorecard import Row, Scorecard
from distill.config.build import quiet
from distill.config.validate import check_address
from distill.options import VerifyOptions
from distill.report.compare import scorecard
from distill.report.tables import grid
from distill.serving.agreement import Comparison, choose, compare
from distill.serving.diagnosis import Circumstances, causes
from distill.serving.endpoint import Endpoint
from distill.serving.metrics import Reading, served
from distill.serving.traffic import Counted, count
from distill.utils.progress import say

FLAGS = {
    "vllm": "vllm serve <target> --speculative-config '{...}'",
    "sglang": "python -m sglang.launch_server ... --speculative-algorithm ...",
}


def command(options: VerifyOptions) -> float:
    """Exit code 0: the engine accepts what the scorecard says; 1: it does not; 2: it cannot be told."""
    if not verify(options):
        raise SystemExit(1)
    return 0.0


def verify(options: VerifyOptions) -> bool:
    """Print the figures, there and here, and what may be wrong.

    Args:
        options: of the command.

    Returns:
        Whether what the engine accepts is what the scorecard says.

    Raises:
        UserError: no scorecard, no engine, no row to hold it against, or too little counted.
    """
    quiet()
    check_address(options.url, options.api_key_env, "", "")
    card = scorecard(Path(options.checkpoint))
    endpoint = Endpoint(options.url, options.timeout, options.api_key_env)
    first, models = endpoint.reading(options.model), endpoint.models()
    if first.engine == "vllm" and not first.speculates:
        return _off(first)
    _check_chain(first, endpoint)
    temperature = card.headline.temperature if options.temperature is None else options.temperature
    if depth := first.depth or options.depth:  # else only the answers tell
        _row(options, card, first, depth, temperature)
    counted = count(options, card, endpoint, first, models, temperature)
    reading = counted.reading
    if not reading.speculates:
        return _off(reading)
    _check_chain(reading, endpoint)
    found = served(reading, counted.histograms)
    if not found.rounds:
        return _idle(endpoint, counted)
    depth = reading.depth or options.depth or len(found.survival)
    if not depth:
        raise UserError(
            f"{endpoint.url}: does not say how many tokens it drafts; give depth=<--speculative-num-steps>"
        )
    row = _row(options, card, reading, depth, temperature)
    same = row.replay is not None and counted.prompts == row.replay.prompts
    result = compare(found, row, options.tolerance, same)
    known = Circumstances(
        target=card.checkpoint.target,
        models=models,
        model=reading.model,
        trained=_trained(Path(options.checkpoint)),
        written=counted.written,
        sampled=temperature > 0,
    )
    return _tell(result, causes(result, known), counted, endpoint, card)


def _row(options: VerifyOptions, card: Scorecard, reading: Reading, depth: int, temperature: float) -> Row:
    again = (
        f"foredraft score checkpoint={options.checkpoint} decode=chain decode.depth={depth} "
        f"'score.temperatures=[{temperature:g}]' out=<a file>, and checkpoint=<that file>"
    )
    if reading.depth and options.depth and reading.depth != options.depth:
        raise UserError(
            f"depth={options.depth}, but the engine counts drafts of {reading.depth} tokens; leave it out"
        )
    return choose(card, depth, temperature, options.decode, again)


def _check_chain(reading: Reading, endpoint: Endpoint) -> None:
    if reading.nodes and reading.depth and reading.nodes > reading.depth:
        raise UserError(
            f"{endpoint.url}: verifies trees of {reading.nodes} tokens, whose acceptance is no chain's; "
            "serve it with --speculative-eagle-topk 1"
        )


def _trained(checkpoint: Path) -> int | None:
    """Tokens that the drafter was trained to draft, where its folder is there to say so."""
    for folder in (checkpoint, checkpoint / "checkpoints" / "best", checkpoint.parent):
        try:
            depth = json.loads((folder / "config.json").read_text())["settings"]["depth"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return depth if isinstance(depth, int) else None
    return None


def _off(reading: Reading) -> bool:
    say(
        f"{reading.engine}: no acceptance is counted: speculative decoding is off, or was dropped when the "
        f"server started (its log says why). Start it with: {FLAGS[reading.engine]}"
    )
    return False


def _idle(endpoint: Endpoint, counted: Counted) -> bool:
    if counted.written is None:
        raise UserError(
            f"{endpoint.url}: nothing was drafted in what was watched ({counted.how}); send prompts "
            "(send=true), or wait longer (seconds=)"
        )
    say(
        f"{counted.how}, and nothing was drafted: the engine has a drafter and does not use it. Batches "
        "above its limit (disable_by_batch_size), a full context, or requests that it never drafts for"
    )
    return False


def _tell(
    found: Comparison, reasons: Sequence[str], counted: Counted, endpoint: Endpoint, card: Scorecard
) -> bool:
    row, what = found.row, found.served
    drafted = "" if what.drafted is None else f", {what.drafted:.0f} draft tokens"
    lines = [
        [
            figure.name,
            f"{figure.served:.3f}",
            f"{figure.scored:.3f}",
            f"{figure.served - figure.scored:+.3f}",
            f"{figure.noise:.3f}",
            "differs" if figure.differs else "",
        ]
        for figure in (found.tau, *found.survival)
    ]
    say(
        f"{what.engine} at {endpoint.url}: {counted.reading.model}\n"
        f"scorecard: step {card.checkpoint.step}, {row.decode}, T={row.temperature:g}, "
        f"batch {row.batch_size}, {row.replay.method if row.replay else 'counted by the decoder'}\n"
        f"counted: {counted.how}; {what.rounds:.0f} rounds{drafted}, from {what.source}\n"
        + grid(["", "served", "scored", "difference", "noise", ""], lines)
        + "\nnoise: what chance alone may make of the same drafter, 99 % over all lines"
    )
    if found.agrees and found.vague:
        raise UserError(
            f"{what.rounds:.0f} rounds are too few to tell whether it is the same drafter; raise count= or "
            "seconds="
        )
    say("agrees with the scorecard" if found.agrees else "DIFFERS from the scorecard; likely causes:")
    for reason in reasons:
        say(f"  - {reason}")
    return found.agrees
