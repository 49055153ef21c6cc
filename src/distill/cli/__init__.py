"""The command line: Hydra main, overrides, defaults from a checkpoint, sweeps."""
