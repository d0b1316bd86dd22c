"""The model: load, score, pack, adapt and save it, and make the tiny one."""
