"""Code that runs in the engine's interpreter; it imports nothing from this project."""
