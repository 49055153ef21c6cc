"""The frozen Hugging Face target with a KV cache per row: load, probe, forward, shard, offload."""
