"""Sweeps: each run in a process of its own, and the table at the end."""
