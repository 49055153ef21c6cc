"""Identity of a model: a checksum over all weights, in memory and in files."""
