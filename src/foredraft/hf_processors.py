"""Processors of logits of transformers' `generate`, as a `Sampler` and as edits of logits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from decode.errors import UserError
from decode.sampling import Sampler

# Classes of transformers with a result that depends on the text and the logits only. Others, such as a class
# of a newer release, are refused: with state or passes of their own they would not be lossless.
STATELESS = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "WatermarkLogitsProcessor",
}
# Warpers that a `Sampler` applies, in its order: class -> (its attribute, the sampler's)
WARPERS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
ORDER = list(WARPERS)


class Processing(NamedTuple):
    """What is done to the target's logits.

    Attributes:
        sampler: what it can express.
        edit: the other processors, which run before it; None: there are none.
    """

    sampler: Sampler
    edit: LogitsEdit | None


class LogitsEdit:
    """Runs processors on rows of different lengths; see `decode.verification.target_probs.EditLogits`.

    `generate` calls processors with all rows of a batch, of one length, and some keep a number for each row.
    So a call has the same shape here, and rows that were not asked for hold another row's text.

    Args:
        processors: of transformers.
        padding: (B,) padding tokens before each prompt, which processors see in `generate` too.
        device: of the prompts, where processors keep their tensors.
    """

    def __init__(
        self, processors: LogitsProcessorList, padding: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._processors, self._padding, self._device = processors, padding, device

    def __call__(self, requests: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(R, V) logits -> (R, V), given the request and the text of each row."""
        rows = [[*self._padding[request], *text] for request, text in zip(requests, texts, strict=True)]
        scores, edited = logits.to(self._device), torch.empty_like(logits)
        for call in _calls(requests, rows):
            some = next(iter(call.values()))
            index = [call.get(request, some) for request in range(len(self._padding))]
            ids: Any = torch.tensor([rows[i] for i in index], device=self._device)
            found: Any = self._processors(ids, scores[index])  # a copy: processors write to it
            mine = torch.tensor(list(call), device=self._device)
            edited[list(call.values())] = found[mine].to(edited)
        return edited


def _calls(requests: Sequence[int], rows: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
    """Groups of rows of one length, each with at most one row of a request: request -> row."""
    found: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    count: Counter[tuple[int, int]] = Counter()
    for row, request in enumerate(requests):
        length = len(rows[row])
        found[length, count[length, request]][request] = row
        count[length, request] += 1
    yield from found.values()


def processing(
    processors: LogitsProcessorList, do_sample: bool, padding: Sequence[Sequence[int]], device: torch.device
) -> Processing:
    """Divide processors into a `Sampler` and an edit that runs before it.

    Args:
        processors: as `generate` made them, in its order.
        do_sample: tokens are drawn.
        padding: see `LogitsEdit`.
        device: see `LogitsEdit`.

    Raises:
        UserError: a processor that has state.
    """
    given = list(processors)
    for processor in given:
        _check(processor, len(padding))
    if given and _name(given[-1]) == "LogitNormalization":
        given.pop()  # changes no probability
    settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    first, at = len(ORDER), len(given)
    while do_sample and at and (rank := _rank(given[at - 1])) < first:
        attribute, name = WARPERS[ORDER[rank]]
        settings[name] = getattr(given[at - 1], attribute)
        first, at = rank, at - 1
    rest = given[:at]
    if len(rest) == 1 and _penalises_prompts(rest[0], padding):
        settings["repetition_penalty"] = rest.pop().penalty
    edit = LogitsEdit(LogitsProcessorList(rest), padding, device) if rest else None
    return Processing(Sampler(**settings), edit)


def _check(processor: Any, rows: int) -> None:
    name = _name(processor)
    if name and name not in STATELESS:
        raise UserError(
            f"generate: {name} depends on more than the text before a token, so drafts cannot be verified "
            "with it; leave out the argument or the processor that asks for it"
        )
    if name == "PrefixConstrainedLogitsProcessor" and rows > 1:
        raise UserError("generate: prefix_allowed_tokens_fn is for one prompt at a time here; give one row")


def _name(processor: Any) -> str:
    """Name of a class of transformers; "" for another, which is taken to be a function of text and logits."""
    kind = type(processor)
    return kind.__name__ if kind.__module__.partition(".")[0] == "transformers" else ""


def _rank(processor: Any) -> int:
    """Place in the order of a `Sampler`; past its end if the sampler does not have this warper."""
    name = _name(processor)
    plain = getattr(processor, "min_tokens_to_keep", 1) == 1 and not (
        name == "TopPLogitsWarper" and processor.top_p == 0
    )
    masks = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    return ORDER.index(name) if name in WARPERS and plain and masks else len(ORDER)


def _penalises_prompts(processor: Any, padding: Sequence[Sequence[int]]) -> bool:
    """Whether it is the repetition penalty of whole texts, without padding."""
    if _name(processor) != "RepetitionPenaltyLogitsProcessor":
        return False
    ignored, pads = processor.prompt_ignore_length, list(map(len, padding))
    return ignored.tolist() == pads if isinstance(ignored, Tensor) else not ignored and not any(pads)
