"""Training of drafters: rollouts, data, objectives and the Lightning trainer."""
