"""Whether the served drafter is the one that was scored: metrics of vLLM and SGLang."""
