"""Abstract bases of drafters: recurrent, feature heads, block, lookup, Hugging Face model, LoRA."""
