"""Verification rules of speculative decoding."""
