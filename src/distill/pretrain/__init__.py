"""Trains the bundled target."""
