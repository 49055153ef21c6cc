"""Datastores of retrieval drafters: texts, tokenised and sorted into a suffix array on disk."""
