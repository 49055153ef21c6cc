"""foredraft watch: say when a served drafter accepts less than its scorecard."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from decode.errors import UserError
from decode.evaluation.estimates import interval
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.config.build import quiet
from distill.config.validate import check_address
from distill.options.commands import WatchOptions
from distill.scoring.compare import scorecard
from distill.serving.agreement import Z_95, chain_row, compare
from distill.serving.diagnosis import ServerFacts, causes
from distill.serving.endpoint import Endpoint
from distill.serving.metrics import Reading, difference, served_acceptance
from distill.utils.progress import say

CONFIDENCE = 0.99  # of one window; a second one in a row confirms it
IN_A_ROW = 2


class Expected(NamedTuple):
    """Acceptance of the scorecard for a mix of requests.

    Attributes:
        tau: tokens per round.
        interval: 95 % interval of tau over prompts.
        prompts: number of prompts behind it.
    """

    tau: float
    interval: Sequence[float]
    prompts: int

    def least(self, requests: float) -> float:
        """Tau that a window of so many requests of the same kind stays above, at `CONFIDENCE`."""
        error = (self.interval[1] - self.interval[0]) / 2 / Z_95
        both = error * math.sqrt(1 + self.prompts / max(requests, 1.0))
        return self.tau - float(stats.norm.ppf(CONFIDENCE)) * both


def command(options: WatchOptions) -> float:
    """Return the exit code: 0: `windows` have ended, as scored; 1: less is accepted than scored."""
    if not watch(options):
        raise SystemExit(1)
    return 0.0


def watch(options: WatchOptions) -> bool:
    """Read the engine's counters in windows of requests; False once two in a row are below the scorecard.

    Raises:
        UserError: no scorecard, no engine, no matching row, or a mix of kinds that were not scored.
    """
    quiet()
    check_address(options.url, options.api_key_env, "", "")
    card = scorecard(Path(options.checkpoint))
    endpoint = Endpoint(options.url, options.timeout, options.api_key_env)
    begin = endpoint.reading(options.model)
    if not begin.speculates:
        raise UserError(f"{endpoint.url}: no acceptance is counted: speculative decoding is off")
    depth = begin.depth or options.depth
    if not depth:
        raise UserError(
            f"{endpoint.url}: does not say how many tokens it drafts; give depth=<--speculative-num-steps>"
        )
    temperature = card.rows[0].temperature if options.temperature is None else options.temperature
    row = chain_row(card, options.checkpoint, depth, temperature, options.row)
    expected = expected_of(card, row, options.mix)
    say(
        f"watching {endpoint.url} in windows of {options.requests} requests; scored: step "
        f"{card.checkpoint.step}, {row.decode}, T={row.temperature:g}, {_scored(expected)}"
    )
    low, done = 0, 0
    while options.windows is None or done < options.windows:
        begin, window = _window(endpoint, options, begin)
        served = served_acceptance(window)
        done += 1
        is_low = served.tau < expected.least(window.requests) - options.tolerance
        low = low + 1 if is_low else 0
        verdict = "lower" if is_low else "as scored"
        say(f"{window.requests:.0f} requests, {served.rounds:.0f} rounds: tau {served.tau:.2f}, {verdict}")
        if low == IN_A_ROW:
            _alarm(options, card, row, expected, window, endpoint)
            return False
    return True


def expected_of(card: Scorecard, row: Row, mix: Mapping[str, float] | None) -> Expected:
    """Acceptance of a row for requests of these kinds.

    Args:
        card: with the kinds of its prompts.
        row: one of its rows.
        mix: kind -> share of the requests; None: as scored.

    Raises:
        UserError: a kind that was not scored, or shares that are not positive.
    """
    tokens, rounds = row.counts.tokens, row.counts.rounds
    weights = [1.0] * len(rounds)
    if mix:
        names = card.categories if len(card.categories) == len(rounds) else []
        if missing := sorted(mix.keys() - set(names)):
            has = ", ".join(sorted(set(names))) or "no kinds"
            raise UserError(f"mix.{missing[0]}: the scorecard has {has}")
        if any(share < 0 for share in mix.values()) or not sum(mix.values()) > 0:
            raise UserError("mix: give shares of 0 or more, as in mix={chat:0.7,code:0.3}")
        weights = [mix.get(name, 0.0) / names.count(name) for name in names]
    chosen = [i for i, weight in enumerate(weights) if weight]
    shares = [weights[i] * tokens[i] for i in chosen], [weights[i] * rounds[i] for i in chosen]
    return Expected(sum(shares[0]) / sum(shares[1]), interval(*shares), len(chosen))


def _window(endpoint: Endpoint, options: WatchOptions, begin: Reading) -> tuple[Reading, Reading]:
    """The reading that ends a window, and what was counted in it; a restarted server begins a new one.

    Raises:
        UserError: no server answers for `patience` seconds.
    """
    away = 0.0
    while True:
        time.sleep(options.interval)
        try:
            now = endpoint.reading(options.model)
        except UserError:
            away += options.interval
            if away > options.patience:
                raise
            continue
        away = 0.0
        try:
            grown = difference(begin, now, f"{endpoint.url}/metrics")
        except UserError:
            say(f"{endpoint.url}: restarted; the window begins again")
            begin = now
            continue
        if grown.requests >= options.requests and served_acceptance(grown).rounds:
            return now, grown


def _alarm(
    options: WatchOptions,
    card: Scorecard,
    row: Row,
    expected: Expected,
    window: Reading,
    endpoint: Endpoint,
) -> None:
    served = served_acceptance(window)
    say(f"LOWER than scored in {IN_A_ROW} windows in a row: tau {served.tau:.2f}, {_scored(expected)}")
    models = endpoint.models()
    sampled = row.temperature > 0
    facts = ServerFacts(card.checkpoint.target, models, window.model, None, None, sampled)
    for reason in causes(compare(served, row, options.tolerance), facts):
        say(f"  - {reason}")
    say(
        "is it the same drafter? foredraft verify-served "
        f"url={options.url} checkpoint={options.checkpoint}\n"
        "if the target has changed: foredraft follow '<folders of the new target>' "
        f"drafter.init_from={options.checkpoint}"
    )


def _scored(expected: Expected) -> str:
    low, high = expected.interval
    return f"tau {expected.tau:.2f} ({low:.2f}..{high:.2f}) of {expected.prompts} prompts"
