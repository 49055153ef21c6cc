"""Scoring of checkpoints: scorecard, target drift, controls, paired differences."""
