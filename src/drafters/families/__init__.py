"""Base classes of drafters."""
