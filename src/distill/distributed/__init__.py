"""Ranks, graceful shutdown on a signal, and a watchdog."""
