"""Drafters as GGUF files for llama.cpp, written with the package gguf and read by xllamacpp in the tests."""
