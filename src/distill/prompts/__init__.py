"""Convert records to prompts, token ids and loss masks; split held-out prompts."""
