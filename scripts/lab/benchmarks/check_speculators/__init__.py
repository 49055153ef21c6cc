"""Compare logits of an export between speculators and this package."""
