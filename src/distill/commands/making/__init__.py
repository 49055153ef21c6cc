"""foredraft make: from a target and prompts to a drafter with a serving command, within a time budget."""
