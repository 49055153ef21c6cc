"""The model card of a drafter: description, recipe, scores, and commands to serve it.

All numbers come from the scorecard or the recipe; missing ones are marked as unknown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from decode.errors import UserError
from decode.evaluation.audit import Audit
from decode.evaluation.quality import QUALITY_HEAD
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import NOT_RUN, Scorecard
from decode.evaluation.served import BY_ENGINE
from decode.model import gguf
from drafters.base import Drafter, Origin
from drafters.checkpoint.markdown import cell, table
from drafters.export.layout import Layout
from drafters.hub.untrusted_files import is_hub_id

LEVELS = 8
CONDITIONS = ("dtype", "threads", "hardware", "load_average", "prompts", "max_new_tokens", "seed")


class Facts(NamedTuple):
    """Contents of a model card.

    Attributes:
        drafter: the drafter.
        kind: its short name.
        origin: its target.
        score: scorecard, or None.
        recipe: recipe of the run, or None.
        to: target format of the export, or `native`.
        layout: exported files; None for the native format.
        repo: hub repository; "" if unknown.
    """

    drafter: Drafter
    kind: str
    origin: Origin
    score: Scorecard | None
    recipe: Mapping[str, Any] | None
    to: str = "native"
    layout: Layout | None = None
    repo: str = ""


def model_card(facts: Facts) -> str:
    """Text of README.md, with front matter for the Hub.

    Raises:
        UserError: a damaged recipe.
    """
    try:
        parts = [_front(facts), _about(facts), _score(facts.score), _recipe(facts.recipe), _serve(facts)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        where = facts.origin.folder or "this drafter"
        raise UserError(f"{where}: its recipe is damaged ({cell(repr(error))})") from None
    return "\n".join(parts)


def _front(facts: Facts) -> str:
    lines = ["---", "library_name: foredraft", "pipeline_tag: text-generation"]
    origin = facts.origin
    base = origin.name if at_hub(origin) else origin.published
    if is_hub_id(base):
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- speculative-decoding", "- draft-model", f"- {facts.kind}"]
    theirs = f"the target ({cell(origin.licence)})" if origin.licence else "the target"
    lines += [f"# license: your choice, within the licenses of {theirs} and the data", "---", ""]
    return "\n".join(lines)


def _about(facts: Facts) -> str:
    drafter, origin = facts.drafter, facts.origin
    module = sys.modules[type(drafter).__module__].__doc__ or ""
    target = portable(origin).name or "(not named)"
    named = origin.published or target
    served = f"{named}, as {target}" if named != target else target
    properties = {
        "target": f"{served}, revision {origin.revision}" if origin.revision else served,
        "target's licence": origin.licence or "(unknown; see the target)",
        "target's fingerprint": origin.fingerprint,
        "tokenizer's hash": origin.tokenizer or "(no tokenizer could be read)",
        "parameters": f"{sum(p.numel() for p in drafter.parameters()):,}",
        "reads of the target": _taps(drafter),
        "confidence head": "yes" if drafter.confidence is not None else "no",
        "files": "native" if facts.to == "native" else f"for {facts.to}",
    }
    return "\n".join(
        [
            f"# A drafter for {cell(named)}: `{facts.kind}`",
            "",
            cell(module.partition("\n\n")[0]),
            "",
            "It proposes tokens that the target then verifies. Verified without loss, the text is the "
            "target's own, whatever this drafter proposes: decoding gets faster or slower, not different.",
            "",
            "| property | value |",
            "|---|---|",
            *(f"| {name} | {cell(value)} |" for name, value in properties.items()),
            "",
        ]
    )


def _taps(drafter: Drafter) -> str:
    if not drafter.taps:
        return "only the text"
    names = ", ".join(map(str, drafter.taps))
    return f"{names} (a number i: the value entering decoder layer i; last: the head's input)"


# -- the scorecard -------------------------------------------------------------------------------


def _score(score: Scorecard | None) -> str:
    if score is None:
        return "## Score\n\nThere is no scorecard: acceptance and speed are unknown.\n"
    head = ["decode", "T", "batch", "tau", "tau_decoded", *(f"s_{j}" for j in range(1, LEVELS + 1))]
    head += ["speedup", "tokens/s", "plain"]
    lines = [_row(row, score) for row in score.rows]
    used = max(len(row.acceptance.survival[:LEVELS]) for row in score.rows)
    dropped = range(5 + used, 5 + LEVELS)  # levels that no plan reaches
    rows = [[cell for i, cell in enumerate(row) if i not in dropped] for row in [head, *lines]]
    conditions = {name: getattr(score.conditions, name) for name in CONDITIONS}
    conditions["commit"] = score.checkpoint.commit
    measured_with = ", ".join(f"{name.replace('_', ' ')} {cell(v)}" for name, v in conditions.items())
    notes = [
        "tau: tokens settled by one pass of the target, its own included, replayed on the target's stored "
        "answers, with the 95 % interval (~: an estimate, or decoded); tau_decoded: counted while decoding, "
        "on fewer prompts; s_j: share of passes that accept at least j drafted tokens; speedup: over plain "
        "decoding by the same code, interleaved in one run.",
        "",
        f"Measured with: {measured_with}.",
    ]
    if reason := score.conditions.elsewhere:
        notes += [
            "",
            f"{BY_ENGINE.capitalize()}, not where it was scored: of the target, {cell(reason)}.",
        ]
    elif not score.pays:
        notes += ["", "**No draft was faster than plain decoding on the machine that scored it.**"]
    for row in score.rows:
        if row.quality:
            changes = "; ".join(f"{n} {c}" for n, c in zip(QUALITY_HEAD, row.quality.cells(), strict=True))
            notes += ["", f"{row.decode} changes the text, T={row.temperature:g}: {changes}."]
    if score.conditions.control != "none":
        notes += ["", f"control={cell(score.conditions.control)}: this is a control, no real score."]
    if drift := score.checkpoint.target_drift:
        notes += [
            "",
            f"Lossless to the {cell(score.checkpoint.lossless_to)}, which is no longer the original: KL "
            f"{drift.kl:.2g} nats a token, the likeliest token the same at "
            f"{100 * drift.top1_agreement:.1f} %.",
        ]
    return "\n".join(
        ["## Score", "", _headline(score), "", *table(rows), *notes, "", audit_line(score.audit), ""]
    )


def _headline(score: Scorecard) -> str:
    """The two numbers of the checkpoint, and their setting."""
    head = score.headline
    return f"**{head.tau_text}, {head.speedup_text}**: {cell(head.setting)}, {head.prompts} held-out answers."


def _row(row: Row, score: Scorecard) -> list[str]:
    survival = [f"{s:.2f}" for s in row.acceptance.survival[:LEVELS]]
    tau, (low, high) = row.acceptance.tau, row.acceptance.tau_interval
    return [
        row.decode + (" (lossy)" if row.lossy else ""),
        f"{row.temperature:g}",
        str(row.batch_size),
        f"{tau:.2f}{'' if row.exact else '~'} ({low:.2f}..{high:.2f})",
        "-" if score.conditions.elsewhere else f"{row.tau:.2f}",
        *survival,
        *["-"] * (LEVELS - len(survival)),
        row.text("speedup", "{:.2f}x", BY_ENGINE),
        row.text("tokens_per_second", "{:.1f}"),
        row.text("plain_tokens_per_second", "{:.1f}"),
    ]


def audit_line(audit: Audit | None) -> str:
    """Result of the losslessness audit in one line."""
    if audit is None:
        return f"Losslessness audit: {NOT_RUN}; the engine that serves it decodes."
    verdict = "passed" if audit.passed else "FAILED"
    text = (
        f"Losslessness audit: {verdict}. Of {audit.tokens} greedy tokens "
        f"{audit.own_row} are the likeliest of their own row and {audit.equal} those of a plain pass "
        f"without cache, {audit.near_ties} are near ties and {audit.mismatches} mismatches"
    )
    if audit.sampled:
        text += f"; of {audit.sampled_tokens} drawn tokens {audit.impossible} were impossible"
    return f"{text}."


# -- how it was made, how it is served -----------------------------------------------------------


def _recipe(recipe: Mapping[str, Any] | None) -> str:
    if recipe is None:
        return "## Data and recipe\n\nThere is no recipe: data and training are unknown.\n"
    lines = ["## Data and recipe", ""]
    for part, values in recipe.items():
        text = values if isinstance(values, str) else json.dumps(values, sort_keys=True)
        lines.append(f"- {cell(part)}: `{' '.join(text.split()).replace('`', '')}`")
    return "\n".join([*lines, ""])


def _serve(facts: Facts) -> str:
    target = portable(facts.origin).name or "<the target>"
    location = facts.repo or "<this folder or repository>"
    lines = ["## Serve", ""]
    if facts.layout:
        if command := facts.layout.command(target, location):
            lines += [f"With {facts.to}:", "", f"    {command}", ""]
        lines += [facts.layout.note, ""] if facts.layout.note else []
        return "\n".join(lines)
    lines += [
        "With foredraft's own decoder:",
        "",
        f"    foredraft generate checkpoint={location} target={target} prompt='...'",
        "",
        "or from Python:",
        "",
        "    import foredraft",
        "",
        f"    target = foredraft.load_target({target!r})",
        f"    drafter = foredraft.load_drafter({location!r}, target)",
        "    print(foredraft.generate(target, '...', drafter).text)",
        "",
        "or in transformers, with a model that is loaded there:",
        "",
        f"    model.generate(**inputs, custom_generate=foredraft.assist({location!r}))",
        "",
    ]
    if not facts.origin.exports:
        lines += ["No known engine can serve this drafter.", ""]
        return "\n".join(lines)
    lines += ["In the files of an engine:", ""]
    lines += [f"    foredraft export checkpoint={location} to={program}" for program in facts.origin.exports]
    return "\n".join([*lines, ""])


def at_hub(origin: Origin) -> bool:
    """Whether the target is a hub repository at a known revision."""
    return origin.revision is not None and is_hub_id(origin.name) and not origin.name.endswith(gguf.SUFFIX)


def portable(origin: Origin) -> Origin:
    """Remove local paths, which are useless to others and may contain a user name."""
    return origin if at_hub(origin) else origin._replace(name=Path(origin.name).name)
