"""Answers of the target model: sharded store, manifest, writer, Ray workers."""
