"""Rules that change the target's distribution, what that costs, and judges of steps."""
