"""Honest experiments on teaching language models to reason: SFT, expert iteration and GRPO with verified rewards."""

__version__ = "0.1.0"
