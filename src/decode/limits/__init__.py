"""Limits of acceptance: bounds for any drafter, and the efficiency of one drafter's trees."""
