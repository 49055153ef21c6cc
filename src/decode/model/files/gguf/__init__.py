"""A GGUF file as a model folder of transformers: what is in the file, and whether it was read."""
