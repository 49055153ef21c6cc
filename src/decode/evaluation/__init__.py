"""Evaluation of drafters: exact replay, timing, audit and scorecard."""
