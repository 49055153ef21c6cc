"""Hours, disk, memory and tau of a large run: from the target's shape, or from the phases of a small run."""
