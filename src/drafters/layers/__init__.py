"""Building blocks of drafters (nn.Module) and the training-time unroll."""
