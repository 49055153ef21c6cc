"""Texts that a drafter looks tokens up in: read, tokenised, and sorted into a suffix array on disk."""
