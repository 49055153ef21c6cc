"""How much to draft: cost model of a round, decode=auto, calibrated trees."""
