"""Check that a served drafter matches its scorecard, by metrics of vLLM and SGLang."""
