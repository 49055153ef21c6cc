"""Benchmarks: decoders, batch sizes, rollouts, training steps, advice."""
