"""The speculative decoding loop and its public face: generate and stream."""
