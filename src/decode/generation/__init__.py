"""The speculative decoding loop and its public functions: generate and stream."""
