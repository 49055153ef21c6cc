"""The target's answers: sharded store, manifest, writer, Ray workers."""
