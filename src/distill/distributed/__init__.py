"""Ranks, and graceful shutdown at a signal."""
