"""Runs from Python; `from rlreason import train, ...` is how its names are imported."""
