"""The model: load, score, pack, adapt and save it, and make the tiny one.

Depends on torch, transformers, the runtime, the texts of the data and the model's settings.
"""
