"""Products and norms of few rows, and copies of weights that they read."""
