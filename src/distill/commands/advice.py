"""What scripts/advise.py has found, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from decode.plan import Plan
from decode.planning.cost_model import PLAIN
from distill.report.tables import grid


def setting(plan: Plan) -> str:
    """Options of train.py, scripts/score.py and scripts/generate.py that decode by a plan."""
    if not plan.depth:
        return "decode=chain decode.depth=0"
    if plan.width > 1:
        group = "hybrid" if plan.proposal == "hybrid" else "dynamic"
        return f"decode={group} decode.depth={plan.depth} decode.width={plan.width} decode.nodes={plan.nodes}"
    text = f"decode=chain decode.depth={plan.depth}"
    if plan.proposal != "fixed":
        text += f" decode.proposal={plan.proposal}"
    if plan.min_confidence:
        text += f" decode.min_confidence={plan.min_confidence:g}"
    if plan.adapt is not None:
        curves = ",".join(f"{batch}:[{','.join(map(str, curve))}]" for batch, curve in plan.adapt.costs)
        text += f" 'decode.adapt={{prior:{plan.adapt.prior},costs:{{{curves}}}}}'"
    return text


def describe(card: dict[str, Any]) -> str:
    """For people."""
    texts = [_described(result) for result in card["results"]]
    under = (
        f"predicted from {card['prompts']} answers and rounds timed by {card['clock']} on "
        f"{card['hardware']}, load {card['load_average']:.2f}; ~: not exact replay"
    )
    return "\n\n".join([*texts, under])


def _described(result: dict[str, Any]) -> str:
    where = f"T={result['temperature']:g}, batch {result['batch_size']}"
    parts = []
    for one in result["drafters"]:
        verify = one["costs"]["verify"]
        lines = [
            [
                row["decode"],
                f"{row['tau']:.2f}{'~' if row['estimate'] else ''}",
                _ms(row["round_seconds"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}x",
                "{:.2f}..{:.2f}".format(*row["speedup_interval"]),
                "-"
                if row["full_batch_tokens_per_second"] is None
                else f"{row['full_batch_tokens_per_second']:.0f}",
            ]
            for row in one["rows"]
        ]
        head = ["decode", "tau", "ms a round", "tokens/s", "speedup", "95 %", "tokens/s, batch full"]
        parts += [
            f"{one['name']}, {where}",
            "verify(n), ms: " + _curve(verify["slots"], verify["seconds"]),
            *(
                f"draft(k), ms, {curve['proposal']}, width {curve['width']}: "
                + _curve(curve["depth"], curve["seconds"])
                for curve in one["costs"]["draft"]
            ),
            grid(head, lines),
        ]
    return "\n".join([*parts, *_advice(result, where)])


def _advice(result: dict[str, Any], where: str) -> Iterator[str]:
    chosen, best = result["choice"], result["oracle"]
    low, high = chosen["speedup_interval"]
    if chosen["decode"] == PLAIN.name:
        yield f"=> {where}: do not draft; nothing here is faster than plain decoding"
    else:
        yield (
            f"=> {where}: {chosen['drafter']}, {chosen['decode']}, {chosen['speedup']:.2f}x "
            f"({low:.2f}..{high:.2f}): {chosen['setting']}"
        )
    for one in result["drafters"]:
        tokens = one["num_speculative_tokens"]
        yield (
            f"   serving {one['name']} with this many requests running, if costs are as here: "
            + (f"num_speculative_tokens={tokens}" if tokens else "without speculation")
        )
    yield (
        f"   oracle: the best of {best['drafts']} drafts known in every round: tau {best['tau']:.2f}, no "
        f"more than {best['speedup']:.2f}x"
        + (f"; without {', '.join(best['left_out'])}" if best["left_out"] else "")
    )


def _curve(x: Sequence[float], seconds: Sequence[float]) -> str:
    return ", ".join(f"{at:g}: {_ms(s)}" for at, s in zip(x, seconds, strict=True))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
