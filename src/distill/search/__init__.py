"""drafter=auto: successive halving over drafter families."""
