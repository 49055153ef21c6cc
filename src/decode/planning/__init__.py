"""Choice of the draft size: cost model of a round, decode=auto, calibrated trees."""
