"""Runs from Python: `train`, `evaluate`, `compose` and `load_run`, which `rlreason` itself hands out."""
