"""Sweeps: each run in a process of its own, and the table at the end.

Depends on the records and the evaluation protocol; loads no torch.
"""
