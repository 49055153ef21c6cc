"""Engines that answer prompts: the target in this process, or an OpenAI-compatible server."""
