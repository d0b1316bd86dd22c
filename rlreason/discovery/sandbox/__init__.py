"""Run untrusted programs: in namespaces if the system allows them, within limits, ending all their processes.

`contained.py` is this side. `warden.py`, `linux.py` and `run_program.py` are the other side: scripts, run by a Python
that imports nothing of this package.
"""
