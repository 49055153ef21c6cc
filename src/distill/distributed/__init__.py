"""Ranks, graceful shutdown at a signal, and a watchdog."""
