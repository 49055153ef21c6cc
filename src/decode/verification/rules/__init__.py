"""Lossless rules, a file each, named as the rule."""
