"""The in-process engine: continuous batching over a preallocated KV cache with the trainer's own weights."""
