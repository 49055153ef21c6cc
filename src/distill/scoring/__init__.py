"""Scores of a checkpoint folder: scorecard, target drift, controls, paired differences."""
