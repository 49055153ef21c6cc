"""What a drafter is worth: exact replay, timing, audit, scorecard, entropy bound."""
