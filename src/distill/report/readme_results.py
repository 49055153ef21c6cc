"""Results of several runs: a small JSON file, and the README's table made from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.scoring.compare import Choice, Scored, in_order, minutes, short
from distill.scoring.paired import Estimate, speedup

BEGIN, END = "<!-- results -->", "<!-- /results -->"
CONDITIONS = ("hardware", "dtype", "threads", "prompts", "max_new_tokens")


def results(scored: Sequence[Scored], choice: Choice) -> dict[str, Any]:
    """Numbers of the headline table and their conditions.

    Acceptance is taken from each card's first plan, or from the chosen one; speedup from the fastest plan at
    each batch size at the first temperature, or from the chosen one.

    Raises:
        UserError: a run was not scored at this choice.
    """
    ordered = in_order(scored, choice)
    conditions = [s.card.conditions for s in ordered]
    return {
        "temperatures": list(choice.temperatures),
        "batch": choice.batch,
        "decode": choice.decode,
        "commit": list(dict.fromkeys(s.card.checkpoint.commit for s in ordered)),
        **{name: list(dict.fromkeys(getattr(c, name) for c in conditions)) for name in CONDITIONS},
        "replayed": sorted({len(row.counts.tokens) for s in ordered for row in s.card.rows}),
        "runs": [_run(s, choice) for s in ordered],
    }


def _run(scored: Scored, choice: Choice) -> dict[str, Any]:
    checkpoint = scored.card.checkpoint
    taus, speedups = [], []
    for temperature in choice.temperatures:
        row = scored.at(temperature, choice.batch, choice.decode)[0]
        tau, interval = row.acceptance.tau, row.acceptance.tau_interval
        cell = {"temperature": temperature, "decode": row.decode, "exact": row.exact}
        taus.append(cell | {"value": tau, "interval": interval})
    for batch, row in scored.by_batch(choice.temperatures[0], choice.decode).items():
        if row.speedup is None:  # an engine decoded it
            continue
        value, interval = speedup(row)
        cell = {"batch": batch, "decode": row.decode, "value": value}
        speedups.append(cell | {"interval": interval and list(interval)})
    trained = {} if checkpoint.train_seconds is None else {"train_seconds": checkpoint.train_seconds}
    return {
        "drafter": scored.name,
        "tau": taus,
        "speedup": speedups,
        **trained,
        "parameters": checkpoint.parameters,
        "audit_passed": scored.card.audit_passed,
        "lossless_to": checkpoint.lossless_to,
        "control": scored.card.conditions.control,
    }


def as_text(values: dict[str, Any]) -> str:
    """Format JSON with one line per run."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items() if name != "runs"]
    runs = ",\n".join(f"    {json.dumps(run)}" for run in values["runs"])
    return "{\n" + ",\n".join([*lines, f'  "runs": [\n{runs}\n  ]']) + "\n}\n"


def headline(values: dict[str, Any], document: str) -> str:
    """Format the results as a Markdown table, with a paragraph on how they were measured.

    `document` is the file that contains the table.
    """
    runs = values["runs"]
    batches = sorted({one["batch"] for run in runs for one in run["speedup"]})
    temperatures = values["temperatures"]
    plans = list(dict.fromkeys(one["decode"] for run in runs for one in run["tau"]))
    timed_plans = {one["decode"] for run in runs for one in run["speedup"]}
    head = ["drafter", *(f"tau, T={t:g}" for t in temperatures), *(f"speedup, batch {b}" for b in batches)]
    lines = [[*head, "trained", "parameters"], ["---", *["---:"] * (len(head) + 1)]]
    for run in runs:
        taus = [_tau(one, several=len(plans) > 1) for one in run["tau"]]
        speeds = {one["batch"]: _speedup(one, several=len(timed_plans) > 1) for one in run["speedup"]}
        trained = minutes(run.get("train_seconds") or None)
        parameters = f"{run['parameters'] / 1e6:.2f} M" if run["parameters"] else "-"
        lines.append([_name(run), *taus, *(speeds.get(b, "-") for b in batches), trained, parameters])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    plan = f" with {plans[0]}" if len(plans) == 1 else ""
    plan_suffix = "" if timed_plans == set(plans) else f" with {next(iter(timed_plans))}"
    plans_note = ", the fastest of the plans that were scored" if len(timed_plans) > 1 else plan_suffix
    notes = [
        f"tau{plan}: tokens a target pass, replayed on the target's answers to {_all(values['replayed'])} "
        "held-out prompts, with its 95 % interval (~: counted by the decoder).",
        f"Speedup{plans_note}: over plain decoding with the same code at T={temperatures[0]:g}, "
        f"{_all(values['prompts'])} prompts of up to {_all(values['max_new_tokens'])} tokens.",
        f"{_all(values['dtype'])}, {_all(values['hardware'])}, threads {_all(values['threads'])}, "
        f"commit {_all(values['commit'])}.",
        f"Written by `{_command(values, document)}`.",
    ]
    return f"{table}\n\n{' '.join(notes)}"


def _command(values: dict[str, Any], document: str) -> str:
    """The command that writes this table, without the runs' folders."""
    decode = ["--decode", values["decode"]] if values["decode"] else []
    words = ["--temperatures", *(f"{t:g}" for t in values["temperatures"]), "--batch", str(values["batch"])]
    return f"foredraft compare RUN ... {shlex.join([*words, *decode, '--readme', document])}"


def _name(run: dict[str, Any]) -> str:
    also = [run["lossless_to"]] if run["lossless_to"] != "target" else []
    also += [f"control={run['control']}: no real score"] if run["control"] != "none" else []
    also += [] if run["audit_passed"] else ["audit FAILED"]
    return f"{run['drafter']} ({', '.join(also)})" if also else run["drafter"]


def _tau(one: dict[str, Any], several: bool) -> str:
    low, high = one["interval"]
    text = f"{one['value']:.2f}{'' if one['exact'] else '~'} ({low:.2f}..{high:.2f})"
    return f"{text}, {short(one['decode'])}" if several else text


def _speedup(one: dict[str, Any], several: bool) -> str:
    text = Estimate(one["value"], one["interval"]).text("{:.2f}x")
    return f"{text}, {short(one['decode'])}" if several else text


def _all(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def insert(document: Path, values: dict[str, Any]) -> None:
    """Put the headline table between the two comments of a Markdown file.

    Raises:
        UserError: no such file, or it does not contain both comments once, in this order.
    """
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{document}: {error.strerror}; name a Markdown file") from None
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise UserError(f"{document}: no place for the table; add {BEGIN} and, below it, {END}, once each")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n{headline(values, document.name)}\n{END}{after}", encoding="utf-8")
