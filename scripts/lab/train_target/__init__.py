"""Trains the bundled target: corpus, module, command."""
