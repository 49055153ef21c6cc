"""Drafters in the files of other programs, and back: rename rules and configs, nothing else."""
