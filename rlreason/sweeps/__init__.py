"""Run many runs as a sweep, each in a process of its own, and print one table at the end.

A `Design` and what `sweep.json` records of its runs are in state.py; preview.py describes it before it starts,
processes.py runs it on this machine, closing.py prints its table, and carry.py decides what the next sweep takes over.
"""
