"""Algorithms decide which sequences a step learns from, and with what advantages."""
