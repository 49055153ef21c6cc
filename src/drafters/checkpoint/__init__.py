"""A drafter's folder: save, load, validate, model card, from_pretrained."""
