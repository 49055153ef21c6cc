"""The frozen Hugging Face model behind a ragged KV cache: load, probe, forward, shard, offload."""
