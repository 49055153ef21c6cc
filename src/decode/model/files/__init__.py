"""Accounts of a model's files: which entries were read."""
