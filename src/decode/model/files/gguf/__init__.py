"""A GGUF file as a model folder of transformers, with an account of what was read."""
