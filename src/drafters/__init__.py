"""Drafters: plain modules with a training face and a decoding face. Need torch and transformers."""
