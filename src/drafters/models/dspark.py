"""DSpark (arXiv:2607.05147), identical to DeepSpec, speculators and vLLM."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from decode.model.head import Head
from drafters.families.token_bias import MarkovBias
from drafters.models.dflash import DFlash


class DSpark(DFlash):
    """DFlash's block, whose logits get a bias of the previous token (`MarkovBias`), one after the other.

    A confidence head reads that token's row of the bias beside the hidden state.

    Args:
        markov_rank: r of the bias.
        sample_from_anchor: the root predicts the first token, as in DeepSpec, so that a block of K places
            drafts K tokens; else K masks do, as in DFlash.
        draft_vocab_size: V' of the tokens that it drafts and is trained over; None: all.
        **options: of `DFlash`.

    Raises:
        UserError: a number out of range.
    """

    info: MarkovBias

    def __init__(
        self,
        markov_rank: int,
        sample_from_anchor: bool,
        draft_vocab_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(draft_vocab_size=draft_vocab_size, **options)
        self.settings |= {"markov_rank": markov_rank, "sample_from_anchor": sample_from_anchor}
        self.root_predicts = sample_from_anchor
        self.info = MarkovBias(options["vocab_size"], markov_rank, draft_vocab_size)

    @property
    @override
    def state_size(self) -> int:
        return self.shape.hidden_size + self.settings["markov_rank"]

    @override
    def output_head(self, head: Head) -> Head:
        # In training, too: the bias has no rows of other tokens.
        return self._head_rows.of(head, self.d2t, self.int8 and not self.training)

    @override
    def resize_vocabulary(self, size: int) -> None:
        super().resize_vocabulary(size)
        self.info.resize(size)
