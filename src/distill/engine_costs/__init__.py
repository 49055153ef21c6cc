"""What rounds cost in the engine that will serve a drafter, and what a drafter can gain there."""
