"""Algorithms decide which sequences to learn from and with what credit. They do not know the optimizer."""
