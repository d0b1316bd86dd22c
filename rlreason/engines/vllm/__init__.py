"""The vLLM engine, in this process or in one of its own, and how it is given the trainer's weights."""
