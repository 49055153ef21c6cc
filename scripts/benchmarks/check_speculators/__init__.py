"""Whether speculators makes of an export what we do."""
