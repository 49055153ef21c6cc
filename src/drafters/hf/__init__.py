"""Hugging Face models that draft: build, LoRA, tokenizers, masks, and prediction heads on file."""
