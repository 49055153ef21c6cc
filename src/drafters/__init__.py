"""Drafters: modules that train by `unroll` and draft by `propose`. Need torch and transformers."""
