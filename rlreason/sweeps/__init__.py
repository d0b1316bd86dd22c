"""Run many runs as a sweep, each in a process of its own, and print one table at the end.

A `SweepState` (state.py, written to `sweep.json`) is made by design.py, run by launcher.py, described by texts.py.
report/carry.py decides what the next sweep takes over.
"""
