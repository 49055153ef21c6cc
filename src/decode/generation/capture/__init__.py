"""Decoding rounds of fixed shapes, which a graph can repeat without the host."""
