"""The training loss: divergence x weights, chunked over the vocabulary."""
