"""Acceptance rules of speculative decoding."""
