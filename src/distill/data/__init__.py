"""Training batches, the data module, and taps kept in memory or on disk."""
