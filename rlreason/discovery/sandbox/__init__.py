"""Run a program that nobody trusts: in namespaces where the system allows them, within limits, its processes all ended.

`contained.py` is this side. `warden.py`, `linux.py` and `run_program.py` run on the other one: as scripts, by a Python
that imports nothing of this package.
"""
