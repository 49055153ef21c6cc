"""Chat templates: rendering within limits, detection of omitted texts, end tokens, loss masks."""
