"""Which model this is: a checksum over all weights, in memory and on file."""
