"""Reproductions of papers that lose to another drafter on both targets, and their helpers."""
