"""Loggers: CSV, Weights & Biases, TensorBoard."""
