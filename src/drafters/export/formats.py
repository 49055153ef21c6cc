"""Tables of export formats by program and drafter, and of readers of other programs' formats.

`check` decides from settings and target whether a program can serve a drafter. It runs before training, at
the end of a run and in `write_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from decode.errors import UserError
from decode.model.target import Target
from drafters.export import dflash, dspark, eagle, eagle3, hf_model, medusa_mlp, mtp
from drafters.export import speculators_read as speculators_reader
from drafters.export import speculators_write as speculators
from drafters.export.layout import Format, Layout, Reader, Refusal, Saved
from drafters.export.llama_cpp import drafts as llama_cpp
from drafters.registry import nested

ROUNDS = 4  # tries at other settings; a change may cause a refusal
NATIVE = "native"  # our own format; every drafter has it
GGUF = "gguf"  # llama.cpp's format
TWO_DRAFTERS = ("cascade", "union")  # made of two drafters; only the first is served
NOT_EXPORTED = (
    "not exported: the second drafter of the {} ({}), which the scores include; engines look up n-grams "
    "themselves"
)

# Program -> short name of the drafter -> format.
FORMATS: Mapping[str, Mapping[str, Format]] = {
    "vllm": {
        "dflash": dflash.VLLM,
        "dspark": dspark.VLLM,
        "eagle": eagle.VLLM,
        "eagle3": eagle3.VLLM,
        "lm": hf_model.VLLM,
        "medusa": medusa_mlp.MEDUSA,
        "medusa2": medusa_mlp.MEDUSA2,
        "mlp": medusa_mlp.MLP,
        "mtp": mtp.VLLM,
        "p_eagle": eagle3.P_EAGLE_VLLM,
    },
    "sglang": {
        "dflash": dflash.SGLANG,
        "dspark": dspark.SGLANG,
        "eagle": eagle.SGLANG,
        "eagle3": eagle3.SGLANG,
        "lm": hf_model.SGLANG,
    },
    "speculators": {
        "dflash": speculators.DFLASH,
        "dspark": speculators.DSPARK,
        "eagle3": speculators.EAGLE3,
        "p_eagle": speculators.P_EAGLE,
    },
    "authors": {
        "eagle": eagle.AUTHORS,
        "eagle3": eagle3.AUTHORS,
        "medusa": medusa_mlp.MEDUSA_AUTHORS,
    },
    GGUF: {
        "dflash": llama_cpp.DFLASH,
        "dspark": llama_cpp.DSPARK,
        "eagle3": llama_cpp.EAGLE3,
        "lm": llama_cpp.LM,
        "mtp": llama_cpp.MTP,
    },
    "transformers": {
        "dflash": dflash.TRANSFORMERS,
        "lm": hf_model.TRANSFORMERS,
        "mtp": mtp.TRANSFORMERS,
    },
    "hf": {
        "hf_dllm": hf_model.MASKED_LM,
        "lm": hf_model.HF,
        "medusa2": hf_model.TUNED,
    },
}
# The first reader that recognises a config is used; the most general come last.
READERS: Sequence[Reader] = (
    medusa_mlp.MEDUSA_READER,
    medusa_mlp.MLP_READER,
    speculators_reader.READER,
    dspark.READER,
    dflash.READER,
    mtp.READER,
    eagle3.READER,
    eagle.READER,
)


class Alternative(NamedTuple):
    """Alternative to a drafter that a program has no format for.

    Attributes:
        reason: why there is no format, or the program's own method.
        drafter: short name of a drafter to train instead; "": none.
        settings: that drafter's settings, for its check.
    """

    reason: str
    drafter: str = ""
    settings: Mapping[str, Any] = {}


DIFFUSION = Alternative(
    "it differs from DFlash, which has one (the newest feature in every position, a vector for each mask, "
    "norms of the taps)",
    "dflash",
    {"taps": [1]},
)
ALTERNATIVES: Mapping[tuple[str, str], Alternative] = {
    **{
        (program, "boosted"): Alternative(
            "no program drafts with two models; export either checkpoint by itself"
        )
        for program in FORMATS
    },
    ("vllm", "lstm"): Alternative(
        "ArcticInference, which has one, is a plugin with its own file format", "mlp"
    ),
    ("vllm", "ngram"): Alternative(
        """it has prompt lookup of its own: --speculative-config '{"method": "ngram", """
        """"num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'"""
    ),
    ("vllm", "suffix"): Alternative(
        "it has suffix decoding of its own, once arctic-inference is installed: "
        """--speculative-config '{"method": "suffix"}'"""
    ),
    ("sglang", "ngram"): Alternative("it has n-grams of its own: --speculative-algorithm NGRAM"),
    ("authors", "medusa2"): Alternative(
        "its heads need the tuned target, which to=hf writes, and the files would name the original one"
    ),
    ("transformers", "ngram"): Alternative(
        "it has prompt lookup of its own: generate(prompt_lookup_num_tokens=5)"
    ),
    ("gguf", "ngram"): Alternative("llama.cpp has lookups of its own: --spec-type ngram-simple"),
    **{(program, "diffusion"): DIFFUSION for program in FORMATS if "dflash" in FORMATS[program]},
}


def accepting(drafter: str, settings: Mapping[str, Any], target: Target) -> list[str]:
    """Programs that can serve a drafter with these settings; every drafter also has the native format."""
    drafter, settings = exported_part(drafter, settings)
    return [to for to in FORMATS if drafter in FORMATS[to] and not _refusals(drafter, settings, target, to)]


def check_format(drafter: str, to: str) -> None:
    """Check that a program has a format for a kind of drafter, before its settings are known.

    Raises:
        UserError: the program has none.
    """
    if drafter not in TWO_DRAFTERS and drafter not in FORMATS[to]:  # else `check` decides
        known = ALTERNATIVES.get((to, drafter), Alternative(""))
        reason = f"; {known.reason}" if known.reason else ""
        ways = [f"train drafter={known.drafter}"] if known.drafter else []
        ways.append(f"set to={' or '.join([*(p for p in FORMATS if drafter in FORMATS[p]), NATIVE])}")
        raise UserError(f"{_no_format(drafter, to)}{reason}; {', or '.join(ways)}")


def check(drafter: str, settings: Mapping[str, Any], target: Target, to: str) -> None:
    """Check that a program can serve a drafter, without reading weights.

    Args:
        drafter: short name.
        settings: arguments of its constructor.
        target: the drafter's target.
        to: program.

    Raises:
        UserError: the program cannot. Settings and programs in the message pass this check.
    """
    whole = drafter, settings
    drafter, settings = exported_part(*whole)
    if drafter not in FORMATS[to]:
        known = ALTERNATIVES.get((to, drafter), Alternative(""))
        ways, own = [], bool(known.reason) and not known.drafter  # the engine has its own method
        if known.drafter and not _refusals(known.drafter, known.settings, target, to):
            ways = [f"train drafter={known.drafter}"]
        reasons = [_no_format(drafter, to), *([known.reason] if known.reason else [])]
    elif refusals := _refusals(drafter, settings, target, to):
        ways, own = _trained_otherwise(*whole, target, to), False
        reasons = [f"to={to}: {refusals[0].reason}", *(refusal.reason for refusal in refusals[1:])]
    else:
        return
    others = accepting(drafter, settings, target)
    if not (ways or others or own):
        reasons.append("no engine takes this drafter")
    ways.append(f"set to={' or '.join([*others, NATIVE])}")
    raise UserError(f"{'; '.join(reasons)}; {', or '.join(ways)}")


def served_length(drafter: str, settings: Mapping[str, Any], to: str) -> int | None:
    """Draft length in the serving command of an export; None: the program does not serve the drafter."""
    drafter, settings = exported_part(drafter, settings)
    found = FORMATS.get(to, {}).get(drafter)
    return found.length(settings) if found and found.length else None


def exported_part(drafter: str, settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Short name and settings of the exported drafter: for `TWO_DRAFTERS`, the first of the two."""
    parts = {name: (part, options) for name, part, options in nested(settings)}
    return parts["first"] if drafter in TWO_DRAFTERS else (drafter, settings)


def _no_format(drafter: str, to: str) -> str:
    return f"to={to}: {to} has no format for drafter {drafter!r}"


def _refusals(drafter: str, settings: Mapping[str, Any], target: Target, to: str) -> list[Refusal]:
    return list(FORMATS[to][drafter].check(settings, target))


class Change(NamedTuple):
    """Another value of an option.

    Attributes:
        old: its value.
        value: to train with.
        because: why, with the program that asks for it.
    """

    old: Any
    value: Any
    because: str


def other_options(
    drafter: str, settings: Mapping[str, Any], target: Target, programs: Sequence[str]
) -> dict[str, Change] | None:
    """Options to train with instead, so that all of these programs can serve it; None: no change does.

    Args:
        drafter: short name of the drafter.
        settings: of the drafter.
        target: of the drafter.
        programs: names of `FORMATS`.

    Returns:
        Changes by option, as in `drafter.fc_norm`.
    """
    part, own = exported_part(drafter, settings)
    prefix = "drafter.first" if drafter in TWO_DRAFTERS else "drafter"
    if not all(part in FORMATS[to] for to in programs):
        return None
    changes: dict[str, Change] = {}
    now = dict(own)
    for _ in range(ROUNDS):
        refusals = [(to, refusal) for to in programs for refusal in _refusals(part, now, target, to)]
        if not refusals:
            return {name: change for name, change in changes.items() if change.value != change.old}
        if not all(refusal.train for _, refusal in refusals):
            return None
        for to, refusal in refusals:
            now |= refusal.train
            for name, value in refusal.train.items():
                changes[f"{prefix}.{name}"] = Change(own.get(name), value, f"to={to}: {refusal.reason}")
    return None


def _trained_otherwise(drafter: str, settings: Mapping[str, Any], target: Target, to: str) -> list[str]:
    """Advice to train with other options; empty if no change of options passes the check."""
    changes = other_options(drafter, settings, target, [to])
    if changes is None:
        return []
    return [f"train with {' '.join(f'{name}={_text(one.value)}' for name, one in changes.items())}"]


def _text(value: Any) -> str:
    """A value in the command line's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_layout(saved: Saved, target: Target, to: str) -> Layout:
    """Convert a drafter to another program's format.

    Raises:
        UserError: see `check`; weights that are untrained, or that the format cannot express.
    """
    check(saved.drafter, saved.settings, target, to)
    if not _has_vocabulary(saved.drafter, to):  # the format lacks the map; all tokens are trained
        saved = saved._replace(weights={name: w for name, w in saved.weights.items() if name != "d2t"})
    if saved.drafter not in TWO_DRAFTERS:
        return FORMATS[to][saved.drafter].write(saved, target)
    kind, settings = exported_part(saved.drafter, saved.settings)
    stem = "first."
    weights = {name.removeprefix(stem): w for name, w in saved.weights.items() if name.startswith(stem)}
    layout = write_layout(Saved(kind, settings, weights, saved.confidence), target, to)
    not_exported = NOT_EXPORTED.format(saved.drafter, saved.settings["second"]["drafter"])
    return layout._replace(note="\n\n".join(filter(None, [layout.note, not_exported])))


def _has_vocabulary(drafter: str, to: str) -> bool:
    """Whether the program's format can restrict the tokens that a drafter proposes."""
    restricting = (eagle.SGLANG, speculators.DFLASH)
    return drafter in ("eagle3", "p_eagle", "dspark") or FORMATS[to].get(drafter) in restricting


def find_reader(config: Mapping[str, Any]) -> Reader | None:
    """The reader for a `config.json`; None if the format is unknown."""
    return next((reader for reader in READERS if reader.matches(config)), None)
