"""Targets with weights spread over processes, devices, memory or disk."""
