"""Hugging Face models as mask-filling drafters: input window, forward pass, check of the model class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.load import is_masked, load_tokenizer
from decode.transfer import RowInts
from drafters.hf.vocabulary import OPTION


class Window(NamedTuple):
    """Model input: the newest tokens of each row up to the root, K masks, then padding."""

    tokens: Tensor  # (B, W)
    seen: Tensor  # (B, W) bool: attention mask, False for padding
    masks: Tensor  # (B, K) positions of the masks


class MaskedModel:
    """A language model with bidirectional attention.

    Masked LMs have it. A causal LM adapted to diffusion (DiffuLLaMA, arXiv:2410.17891) gets an attention
    mask that hides only padding.

    Args:
        model: masked or causal LM.
        mask_token: id of the mask.
        masks: number of masks after the text, K.
        shift: distance from a mask back to the position that predicts its token.

    Attributes:
        head: maps the output of `read` to logits.
        room: maximum number of text tokens; None: unlimited.

    Raises:
        UserError: the context is too short for the masks; see also `CausalLM`.
    """

    def __init__(self, model: PreTrainedModel, mask_token: int, masks: int, shift: int) -> None:
        lm = CausalLM(model)
        self.model, self.mask_token, self.masks, self.shift = model, mask_token, masks, shift
        self.head, self.vocab_size = lm.head, lm.vocab_size
        context = _context_length(lm)
        if context is not None and context <= masks:
            raise UserError(
                f"drafter.depth={masks}: the model reads {context} tokens, masks and text; "
                f"set drafter.depth={context - 1} or less"
            )
        self.room = None if context is None else context - masks

    def window(self, texts: Tensor, lengths: Sequence[int]) -> Window:
        """The window of (B, T) right-padded texts of these lengths; long texts are cut at the beginning."""
        most = max(lengths) if self.room is None else self.room
        end = RowInts.of(lengths).on(texts.device)[:, None]  # (B, 1)
        size = end.clamp_max(most)
        place = torch.arange(min(max(lengths), most) + self.masks, device=texts.device)
        tokens = texts.gather(1, (end - size + place).clamp_max(texts.shape[1] - 1))
        tokens = tokens.clamp_max(self.vocab_size - 1).masked_fill(place >= size, self.mask_token)
        return Window(tokens, place < size + self.masks, size + place[: self.masks])

    def read(self, window: Window) -> Tensor:
        """One forward pass -> (B, K, D') input of the head for every mask."""
        return self.forward(window, window.masks - self.shift)

    def forward(self, window: Window, places: Tensor) -> Tensor:
        """One forward pass -> (B, n, D') input of the head at (B, n) places, without computing logits."""
        hidden: list[Tensor] = []

        def capture(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            del module
            hidden.append(args[0].gather(1, places[..., None].expand(-1, -1, args[0].shape[-1])))
            return (args[0][:, :0],)  # the model's own head gets no rows

        hook = self._output_layer().register_forward_pre_hook(capture)
        try:
            self.model(**self.inputs(window))
        finally:
            hook.remove()
        return hidden[0]

    def inputs(self, window: Window) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass."""
        if is_masked(self.model.config):  # computes positions itself, not always from 0
            return {"input_ids": window.tokens, "attention_mask": window.seen.long()}
        width, weight = window.tokens.shape[1], self.head.weight
        bias = torch.zeros(window.seen.shape, dtype=weight.dtype, device=weight.device)
        bias = bias.masked_fill(~window.seen, torch.finfo(weight.dtype).min)
        return {
            "input_ids": window.tokens,
            "attention_mask": bias[:, None, None].expand(-1, -1, width, -1),
            "position_ids": torch.arange(width, device=weight.device).expand(len(bias), -1),
            "use_cache": False,
        }

    def _output_layer(self) -> nn.Module:
        output = self.model.get_output_embeddings()
        assert isinstance(output, nn.Module)
        return output


def _context_length(lm: CausalLM) -> int | None:
    """Maximum number of input tokens; None: unlimited."""
    limit = lm.max_positions
    for module in lm.base.modules():
        table = getattr(module, "position_embeddings", None)
        if limit and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return limit - table.padding_idx - 1  # RoBERTa's positions start after its padding index
    return limit


def mask_id(model: PreTrainedModel, path: str, revision: str | None, token: int | str | None) -> int:
    """Id of the mask token from its id or text; None: from the tokenizer, else the config.

    Raises:
        UserError: there is no mask token, or the model has no such id.
    """
    mask = token if isinstance(token, int) else _token_id(path, revision, token)
    if mask is None and token is None:
        mask = getattr(model.config.get_text_config(), "mask_token_id", None)
    if mask is None:
        who = "neither its tokenizer nor its config.json names a mask token"
        raise UserError(
            f"{OPTION}={path}: {who if token is None else f'its tokenizer has no token {token!r}'}; "
            "set drafter.mask_token to the mask's id or text"
        )
    embedding: Any = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    if not 0 <= mask < size:
        raise UserError(f"drafter.mask_token={mask}: {path} has the ids 0 to {size - 1}")
    return mask


def _token_id(path: str, revision: str | None, token: str | None) -> int | None:
    """Id of a token, or of the mask token, from the model's tokenizer; None if there is none."""
    try:
        tokenizer: Any = load_tokenizer(path, revision)
    except UserError:
        return None
    return tokenizer.mask_token_id if token is None else tokenizer.get_vocab().get(token)


@torch.no_grad()
def check_fills_masks(masked: MaskedModel, path: str) -> None:
    """Check that a model behaves as `MaskedModel` assumes: padding hidden, bidirectional, plain head.

    Raises:
        UserError: names the assumption that fails.
    """
    try:
        problem = _find_problem(masked)
    except Exception as error:  # a foreign model's code may raise anything
        problem = f"raised {type(error).__name__} ({(str(error).splitlines() or [''])[0][:120]})"
    if problem:
        kind = type(masked.model).__name__
        raise UserError(f"{OPTION}={path}: {kind} cannot fill in masks here: it {problem}")


def _find_problem(masked: MaskedModel) -> str:
    head, vocab = masked.head, masked.vocab_size
    texts = torch.arange(1, 13, device=head.weight.device).view(2, 6) % vocab
    window = masked.window(texts, [6, 3])
    hidden = masked.read(window)
    junk = torch.where(window.seen, window.tokens, (window.tokens + 1) % vocab)
    # Tolerance for rounding: all passes have the same shapes.
    near = 1e-4 if head.weight.dtype.itemsize >= 4 else 2e-2
    if _difference(masked.read(window._replace(tokens=junk)), hidden) > near:
        return "reads padding"
    last = window.tokens.scatter(1, window.masks[:, -1:], (masked.mask_token + 1) % vocab)
    first = torch.zeros_like(window.masks[:, :1])
    if not _difference(masked.forward(window._replace(tokens=last), first), masked.forward(window, first)):
        return "attends only to earlier tokens, whatever mask it is given"
    places = (window.masks - masked.shift)[..., None].expand(-1, -1, vocab)
    logits = masked.model(**masked.inputs(window)).logits.gather(1, places)
    return "" if _difference(head(hidden), logits) <= near else "does more to its logits than its head"


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
