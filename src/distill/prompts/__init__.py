"""From records to prompts, token ids and loss masks; the held-out split."""
