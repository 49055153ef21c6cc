"""Training batches, the data module, and cached hidden states in memory or on disk."""
