"""Chat templates: rendering within limits, what a template loses, ends of answers, loss masks."""
