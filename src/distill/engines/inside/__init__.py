"""Code that runs inside an engine, in the engine's interpreter: it imports nothing of ours."""
