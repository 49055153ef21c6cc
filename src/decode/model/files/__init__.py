"""What lies in the files of a model, and what of it was read."""
