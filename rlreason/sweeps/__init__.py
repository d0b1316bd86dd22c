"""Run many runs as a sweep, each in a process of its own, and print one table at the end.

A `Design` (design.py) is checked and described (plan.py), run here (runner.py), by Hydra's launchers (launched.py) or
on a cluster (elsewhere.py), recorded in `sweep.json` (state.py, board.py) and closed with a table (closing.py);
carry.py decides what the next sweep takes over.
"""
