"""Honest experiments on teaching language models to reason: GRPO and its relatives with verified rewards."""

__version__ = "0.1.0"
