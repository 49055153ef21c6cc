"""Targets whose weights are spread over processes, devices, memory or disk."""
