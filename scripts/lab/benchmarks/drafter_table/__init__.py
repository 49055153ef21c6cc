"""scripts/lab/benchmark.py drafters: every drafter by its recipe, and one table of all scorecards."""
