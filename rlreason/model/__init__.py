"""The model: load, encode, pack, score, adapt and save it; the tiny built-in model; memory plans."""
