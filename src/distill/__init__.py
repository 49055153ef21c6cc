"""Rollouts, data, objectives and the Lightning side of training drafters."""
