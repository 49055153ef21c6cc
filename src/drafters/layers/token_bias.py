"""Low-rank bias of the previous token on a drafter's logits, applied after the hidden states are computed.

`TokenInfoBias` is Lyanna's token-info embedding (arXiv:2602.21224), a gated one, or Domino's corrector
(arXiv:2605.29707). `MarkovBias` is DSpark's Markov head (arXiv:2607.05147), as engines load it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.kernels.weight_state import weight_state
from decode.model.head import Side
from drafters.layers.decoder_layer import RMSNorm
from drafters.vocabulary import TokenCounts

KINDS = ("none", "vanilla", "gated", "recurrent", "attention")
OF_ONE_TOKEN = ("vanilla", "gated")  # u depends on the previous token only, so that a table can hold W2 u
AGES = 16  # of drafted tokens, with a learned weight each; older ones have the last one's
TABLE_BYTES = 2**28  # limit for a table of all pairs of hot tokens


class TokenBias(nn.Module, ABC):
    """Low-rank bias(t) = W2 u on the logits after token t; subclasses define u.

    Args:
        emb: E, rows of tokens.
        out: W2, (rows, r); initialised to 0.

    Attributes:
        hot: target ids of W2's rows, ascending; None: the whole draft vocabulary.
        reduced: whether the logits are of a reduced draft vocabulary.
    """

    hot: Tensor | None
    reduced: bool

    def __init__(self, emb: nn.Embedding, out: Linear) -> None:
        super().__init__()
        self.emb, self.out = emb, out
        nn.init.zeros_(out.weight)
        self._table: tuple[Any, Tensor] | None = None

    def side(self, reduced: bool) -> Side:
        """The map from u to logits, of the target's vocabulary or of the reduced one."""
        del reduced
        return Side(self.out.weight)

    @abstractmethod
    def low_rank_input(
        self, token: Tensor, state: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(..., r) input u of W2, and the memory after these tokens.

        Args:
            token: (...) previous tokens, ids of the target.
            state: (..., D) hidden states of the biased logits.
            memory: (..., M) before these tokens; None at the root, or without a memory.
        """

    # -- decoding --------------------------------------------------------------------------------

    def add(
        self, logits: Tensor, token: Tensor, state: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, 1, V) logits and (B, 1, D) states below (B, W) tokens -> (B, W, V) logits, (B, W, M) memory.

        A precomputed table of all pairs of tokens replaces two products if it is small enough.
        """
        state = state.expand(-1, token.shape[1], -1)
        table = self._pair_table()
        if table is None:
            low, memory = self.low_rank_input(token, state, memory)
            return self.side(self.reduced).add(logits, low), memory
        return self.side(self.reduced).scatter(logits, self._look_up(table, token, state)), None

    @abstractmethod
    def _all_inputs(self) -> Tensor | None:
        """(N, r) u of every row of E; None if u depends on more than the token."""

    @abstractmethod
    def _look_up(self, table: Tensor, token: Tensor, state: Tensor) -> Tensor:
        """(..., V_s) biases after (...) tokens, from the (N + 1, V_s) table."""

    def table_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the table of all pairs of tokens, in the dtype that is decoded in."""
        return len(self.emb.weight) * len(self.out.weight) * dtype.itemsize

    def _pair_table(self) -> Tensor | None:
        """(N + 1, V_s) biases after every row of E, and a row of 0; None while weights train. Cached."""
        weight = self.out.weight
        if self.table_bytes(weight.dtype) > TABLE_BYTES or weight.requires_grad:
            return None
        version = [(w.device, w.dtype, *weight_state(w)) for w in self.parameters()]
        if self._table is None or self._table[0] != version:
            with torch.inference_mode(False), torch.no_grad():  # usable outside inference mode, too
                inputs = self._all_inputs()  # computed only to rebuild the table
                if inputs is None:
                    return None
                rows = F.linear(inputs, weight)
                self._table = version, torch.cat([rows, rows.new_zeros(1, len(weight))])
        return self._table[1]


class MarkovBias(TokenBias):
    """u = E[t], with rows for all tokens and no norm: DSpark's Markov head (arXiv:2607.05147).

    Args:
        vocab_size: V, rows of E.
        rank: r.
        draft_vocab_size: V' of a reduced draft vocabulary, rows of W2; None: V.

    Raises:
        UserError: a rank below 1.
    """

    hot = None

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int | None = None) -> None:
        if rank < 1:
            raise UserError(f"drafter.markov_rank={rank}: must be at least 1 (no bias: drafter=dflash)")
        size = draft_vocab_size or vocab_size
        super().__init__(nn.Embedding(vocab_size, rank), Linear(rank, size, bias=False))
        self.reduced = draft_vocab_size is not None

    def resize(self, size: int) -> None:
        """Give the draft vocabulary another size, before training."""
        weight = self.out.weight
        self.out = Linear(weight.shape[1], size, bias=False).to(weight)
        nn.init.zeros_(self.out.weight)

    @override
    def low_rank_input(
        self, token: Tensor, state: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        del state, memory
        return self.emb(token), None

    @override
    def _all_inputs(self) -> Tensor:
        return self.emb.weight

    @override
    def _look_up(self, table: Tensor, token: Tensor, state: Tensor) -> Tensor:
        del state
        return table[token]


class TokenInfoBias(TokenBias):
    """A bias of hot tokens on hot tokens.

    vanilla: u = norm(E[t]). gated: u = norm(E[t]) sigmoid(w . [s; E[t]]) with the hidden state s.
    recurrent: u = SiLU(W1 [s; g]) with the state g of a GRU over the drafted tokens. attention: u = SiLU(W1
    [s; E[t]; a]), where a query of [s; E[t]] attends to the embeddings of all drafted tokens, with a learned
    weight for each age. Only hot tokens have rows in E and W2; the bias of and on other tokens is 0.

    Args:
        kind: of `KINDS`, not none.
        hidden_size: D of the states.
        vocab_size: V.
        rank: r.
        hot_tokens: number of hot tokens V_s; V or more: all tokens.
        draft_vocab_size: V' of a reduced draft vocabulary that contains the hot tokens; None: V.
        eps: of the norm.

    Raises:
        UserError: an unknown kind, or a size below 1.
    """

    hot: Tensor | None  # (V_s,) ids, ascending
    place: Tensor | None  # (V,) index of each token in `hot`, or -1
    rows: Tensor | None  # (V_s,) hot tokens as draft ids, if the draft vocabulary has others

    def __init__(
        self,
        kind: str,
        hidden_size: int,
        vocab_size: int,
        rank: int,
        hot_tokens: int,
        eps: float = 1e-6,
        draft_vocab_size: int | None = None,
    ) -> None:
        if kind not in KINDS[1:]:
            raise UserError(f"drafter.token_info={kind}: choose one of {', '.join(KINDS)}")
        if rank < 1 or hot_tokens < 1:
            raise UserError(f"drafter: info_rank={rank}, hot_tokens={hot_tokens}; both must be at least 1")
        size = min(hot_tokens, draft_vocab_size or vocab_size)
        super().__init__(nn.Embedding(size, rank), Linear(rank, size, bias=False))
        self.kind, self.rank = kind, rank
        reduced = size < vocab_size
        self.reduced = draft_vocab_size is not None
        # Before `fit` the hot tokens are the first ids.
        self.register_buffer("hot", torch.arange(size) if reduced else None)
        place = torch.arange(vocab_size)
        self.register_buffer("place", torch.where(place < size, place, -1) if reduced else None)
        fewer = draft_vocab_size is not None and size < draft_vocab_size
        self.register_buffer("rows", torch.arange(size) if fewer else None)
        self.norm = RMSNorm(rank, eps=eps) if kind != "recurrent" else None
        self.gate = Linear(hidden_size + rank, 1) if kind == "gated" else None
        self.cell = nn.GRUCell(rank, rank) if kind == "recurrent" else None
        read = {"recurrent": 1, "attention": 2}.get(kind)  # vectors next to the state
        self.mix = Linear(hidden_size + read * rank, rank) if read else None
        self.query = Linear(hidden_size + rank, rank, bias=False) if kind == "attention" else None
        self.age = nn.Parameter(torch.zeros(AGES)) if kind == "attention" else None

    @torch.no_grad()
    def choose(self, counts: TokenCounts, d2t: Tensor | None, dtype: torch.dtype) -> str:
        """Choose the most frequent tokens of the answers as hot tokens; `d2t` contains them.

        Returns:
            Their number, their share of the answers, and the size of the table in the `dtype` of decoding.
        """
        assert self.hot is not None
        assert self.place is not None
        self.hot.copy_(counts.most_frequent(len(self.hot)))
        self.place.fill_(-1)
        self.place[self.hot] = torch.arange(len(self.hot), device=self.place.device)
        if self.rows is not None and d2t is not None:
            self.rows.copy_(torch.searchsorted(d2t, self.hot))
        line = f"{len(self.hot)} hot {counts.share(self.hot.cpu())}"
        if self._all_inputs() is None:
            return line
        size, most = self.table_bytes(dtype) >> 20, TABLE_BYTES >> 20
        if size > most:
            return f"{line} (no bias table: {size} MiB, over {most})"
        return f"{line} (bias table: {size} MiB)"

    @override
    def side(self, reduced: bool) -> Side:
        return Side(self.out.weight, self.rows if reduced else self.hot)

    @override
    def low_rank_input(
        self, token: Tensor, state: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        embedded, in_table = self._embed(token)
        if self.cell is not None and self.mix is not None:
            before = embedded.new_zeros(embedded.shape) if memory is None else memory
            after = self.cell(embedded.flatten(0, -2), before.flatten(0, -2)).view_as(embedded)
            return F.silu(self.mix(torch.cat([state, after], -1))), after
        if self.query is not None and self.mix is not None:
            drafted = embedded if memory is None else torch.cat([memory, embedded], -1)  # (..., j r)
            found = self._attend(self.query(torch.cat([state, embedded], -1)), drafted)
            return F.silu(self.mix(torch.cat([state, embedded, found], -1))), drafted
        assert self.norm is not None
        low = self.norm(embedded) * in_table
        return low * self._gate(embedded, state), None

    def _embed(self, token: Tensor) -> tuple[Tensor, Tensor | float]:
        """(..., r) rows of E, and a factor (..., 1) that is 0 for tokens that are not hot."""
        if self.place is None:
            return self.emb(token), 1.0
        index = self.place[token]
        in_table = (index >= 0)[..., None].to(self.out.weight.dtype)
        return self.emb(index.clamp_min(0)) * in_table, in_table

    def _attend(self, query: Tensor, drafted: Tensor) -> Tensor:
        """(..., r) queries and (..., j r) embeddings of j drafted tokens, the oldest first -> (..., r)."""
        assert self.norm is not None
        assert self.age is not None
        keys = self.norm(drafted.unflatten(-1, (-1, self.rank)))  # (..., j, r)
        number = keys.shape[-2]
        age = torch.arange(number - 1, -1, -1, device=keys.device).clamp_max(AGES - 1)
        scores = (keys @ query[..., None]).squeeze(-1) * self.rank**-0.5 + self.age[age]
        return (scores.softmax(-1)[..., None] * keys).sum(-2)

    def _gate(self, embedded: Tensor, state: Tensor) -> Tensor | float:
        if self.gate is None:
            return 1.0
        return self.gate(torch.cat([state, embedded], -1)).sigmoid()

    @override
    def _all_inputs(self) -> Tensor | None:
        return self.norm(self.emb.weight) if self.norm is not None and self.kind in OF_ONE_TOKEN else None

    @override
    def _look_up(self, table: Tensor, token: Tensor, state: Tensor) -> Tensor:
        bias = table[token if self.place is None else self.place[token]]  # -1 is the last row, all 0
        return bias if self.gate is None else bias * self._gate(self._embed(token)[0], state)


class TeacherForcedBias:
    """The token bias in training: previous tokens come from the texts.

    Args:
        info: the bias, or None.
        tokens: (B, T).
    """

    def __init__(self, info: TokenBias | None, tokens: Tensor) -> None:
        self._info, self._tokens = info, tokens.flatten()
        self._memory: Tensor | None = None
        self._anchors: Tensor | None = None

    def with_bias_input(self, state: Tensor, anchor: Tensor, depth: int) -> Tensor:
        """(M, D) states of the anchors -> (M, D + r) input of a head with the bias."""
        if self._info is None:
            return state
        memory = self._memory
        if memory is not None and self._anchors is not None and len(self._anchors) > len(anchor):
            memory = memory[torch.searchsorted(self._anchors, anchor)]
        low, self._memory = self._info.low_rank_input(self._tokens[anchor + depth], state, memory)
        self._anchors = anchor
        return torch.cat([state, low], -1)
