"""Lossless rules; each file has the name of its rule."""
