"""Datastores of given tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from distill.datastore.build import write_datastore
from drafters.drafting.datastore import datastore_folder, token_type


def store_of(texts: Sequence[Sequence[int]], vocab_size: int = 30) -> str:
    """Write a datastore of these texts where this machine keeps them; returns its key."""
    key, kind = hashlib.sha256(repr((texts, vocab_size)).encode()).hexdigest()[:16], token_type(vocab_size)
    folder = datastore_folder(key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    rows = (np.array([*text, np.iinfo(kind).max]).astype(kind) for text in texts)
    if not folder.exists():
        write_datastore(folder, rows, vocab_size)
    return key
