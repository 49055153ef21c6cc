"""Measurements of rounds, training steps and field rows on one device."""
