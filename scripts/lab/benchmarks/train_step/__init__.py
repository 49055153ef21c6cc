"""The training step timed against speculators, in processes of any environment."""
