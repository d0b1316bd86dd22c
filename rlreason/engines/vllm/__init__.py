"""The vLLM engine: vLLM in processes of their own, and how they are given the trainer's weights."""
