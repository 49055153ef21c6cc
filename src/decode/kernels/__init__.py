"""Products and norms of few rows, and the weight copies that they use."""
