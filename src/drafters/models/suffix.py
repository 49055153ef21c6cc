"""SuffixDecoding (Oliaro et al., arXiv:2411.04975): frequent continuations in the text and past rollouts.

With a datastore also those in other texts (REST, He et al., arXiv:2311.08252).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from drafters.base import Progress, Text, constructor_arguments
from drafters.drafting.datastore import DEPTH, Datastore
from drafters.drafting.ngram_counts import NgramCounts, hashes
from drafters.families.lookup import IndexedText, LookupDrafter, Node, best_tree

OCCURRENCES = 32  # newest occurrences of an n-gram counted in the row's own text
LONGEST = 64  # maximum tokens of a match
NEGLIGIBLE = 0.01  # probability below which shorter matches are not looked up


class Suffix(LookupDrafter):
    """Proposes the most probable continuations of the newest tokens, from counts of earlier continuations.

    Sources are the row's own text, prompt included, the rollouts of `fit`, and a datastore. The newest n
    tokens are looked up for n = 1, 2, 4, ... up to `longest`. Estimates of all n are blended as in prediction
    by partial matching (Cleary and Witten 1984), with escape probabilities after Witten and Bell (1991). If
    N occurrences in the row's own text are followed by D different tokens, c times by token t, and by N', D'
    and c' in the rollouts,

        p_n(t) = (w c + c' + E p_m(t)) / (w N + N' + E),    E = w D + escape D',

    with w = `own_weight` and m the next shorter length. Occurrences in the datastore, at most
    `datastore.SAMPLE` of an n-gram and n at most `datastore.DEPTH`, are added to N', D' and c' with weight
    `store_weight`. Tokens below a drafted path are estimated likewise; a node's probability is the product
    along its path. (The paper uses one n and one source, those with the largest score.)

    Args:
        longest: maximum number of matching tokens; powers of two up to it are looked up.
        min_probability: minimum estimated probability of a node.
        max_tokens: size limit of the corpus, in tokens of 4 bytes; the newest rollouts are kept.
        vocab_size: V of the target.
        own_weight: of an occurrence in the row's own text, relative to one in a rollout.
        escape: weight of shorter matches where rollouts have longer ones.
        store: name of the datastore's texts (not part of the checkpoint); None: no datastore.
        store_key: of the datastore, see `Datastore.open`.
        store_weight: of an occurrence in the datastore, relative to one in a rollout.
        size: of the corpus, including one separator per rollout.

    Raises:
        UserError: an option out of range.
    """

    corpus: Tensor  # (n,)

    def __init__(
        self,
        longest: int,
        min_probability: float,
        max_tokens: int,
        vocab_size: int,
        own_weight: float = 1000.0,
        escape: float = 4.0,
        store: str | None = None,
        store_key: str = "",
        store_weight: float = 1.0,
        size: int = 0,
    ) -> None:
        settings = constructor_arguments(locals())
        low = {"longest": 1, "own_weight": 0, "escape": 0, "min_probability": 0, "max_tokens": 0}
        low["store_weight"] = 0
        for name, least in low.items():
            if settings[name] < least:
                raise UserError(f"drafter.{name}={settings[name]}: must be at least {least}")
        if longest > LONGEST:  # untrusted; every length costs a pass over the corpus
            raise UserError(f"drafter.longest={longest}: must be at most {LONGEST}")
        super().__init__([2**i for i in range(longest.bit_length())])
        self.settings = settings
        self.longest, self.own_weight, self.escape = longest, own_weight, escape
        self.min_probability, self.store_weight = min_probability, store_weight
        self.register_buffer("corpus", torch.full((size,), PAD, dtype=torch.int32))
        self._counts: NgramCounts | None = None  # of `corpus`, made on first use
        self._store: Datastore | None = None

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        drafter = cls(**options, vocab_size=target.vocab_size)
        drafter._open_store()
        return drafter

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        drafter = super().restore(settings, target)
        drafter._open_store()
        return drafter

    def _open_store(self) -> None:
        """Open the datastore, if any.

        Raises:
            UserError: see `Datastore.open`.
        """
        store, key = self.settings["store"], self.settings["store_key"]
        if store is None or self._store is not None:
            return
        try:
            self._store = Datastore.open(key, self.settings["vocab_size"])
        except UserError as error:
            raise UserError(f"drafter.store={store}: {error}") from None

    @override
    def fit(
        self, texts: Iterable[Text], target: Target | None = None, progress: Progress | None = None
    ) -> str:
        """Store the newest rollouts: answers, with up to `longest` tokens of the prompt."""
        del target, progress
        texts_kept: deque[np.ndarray] = deque()
        size = total = rows = 0
        for text in texts:
            written = np.asarray(text.loss_mask, bool)
            if not written.any():
                continue
            begin = max(0, int(written.argmax()) - self.longest)
            texts_kept.append(np.append(text.tokens[begin:], PAD).astype(np.int32))
            rows, size, total = rows + 1, size + len(texts_kept[-1]), total + len(texts_kept[-1])
            while size > self.settings["max_tokens"]:
                size -= len(texts_kept.popleft())
        self.corpus = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *texts_kept]))
        self.settings["size"] = size
        self._counts = None
        return (
            f"the newest {len(texts_kept):,} of {rows:,} rollouts kept, {size:,} of {total:,} tokens "
            f"(at most {self.settings['max_tokens']:,}), {size * 4 / 2**20:.1f} MiB; nothing is trained"
        )

    @override
    def new_state(self, rows: int) -> list[IndexedText]:
        self._open_store()
        if self._counts is None:
            tokens = self.corpus.cpu().numpy()
            if tokens.size and not (tokens.min() >= PAD and tokens.max() < self.settings["vocab_size"]):
                raise UserError("drafter=suffix: its corpus has invalid token ids; fit it again")
            self._counts = NgramCounts(tokens, self.orders)
        return super().new_state(rows)

    @override
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        return best_tree(lambda path: self.next_tokens(history, path, plan.width), plan, self.min_probability)

    @override
    def next_tokens(self, history: IndexedText, path: Path, count: int) -> list[tuple[int, float]]:
        assert self._counts is not None
        newest = (*history.tokens[-self.longest :], *path)[-self.longest :]
        found: dict[int, float] = {}
        left = 1.0  # probability left to shorter matches
        hashed = hashes(newest, self.orders)
        for n, value in zip(reversed(self.orders[: len(hashed)]), reversed(hashed), strict=True):
            past = self._counts.after(n, value)
            own = history.next_tokens(newest[-n:], OCCURRENCES) if self.own_weight else {}
            stored = self._stored(newest[-n:])
            total = self.own_weight * sum(own.values()) + (past.total if past else 0)
            total += self.store_weight * sum(stored.values())
            if not total:
                continue
            escape = self.own_weight * len(own) + (self.escape * past.distinct if past else 0)
            escape += self.store_weight * self.escape * len(stored)
            share = left / (total + escape)  # of one occurrence
            if past:
                for token, times in zip(past.tokens, past.counts, strict=True):
                    found[token] = found.get(token, 0.0) + share * times
            for counts, weight in ((own, self.own_weight), (stored, self.store_weight)):
                for token, times in counts.items():
                    found[token] = found.get(token, 0.0) + share * weight * times
            left *= escape / (total + escape)
            if left < NEGLIGIBLE:
                break
        return nlargest(count, found.items(), key=itemgetter(1))

    def _stored(self, ngram: Path) -> dict[int, int]:
        """Token -> its count after an n-gram in the datastore."""
        if self._store is None or not self.store_weight or len(ngram) > DEPTH:
            return {}
        return self._store.next_tokens(ngram)
