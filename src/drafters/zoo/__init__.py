"""Drafters that reproduce a paper and lose to another drafter on both targets, with what only they need."""
