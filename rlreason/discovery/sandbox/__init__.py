"""Run untrusted programs: by bwrap or unshare where they work, within limits, ending all their processes.

`contained.py` and `commands.py` are this side. The other side are scripts, run by a Python that imports nothing of this
package: `warden.py`, which ends all; `restrict.py`, which sets limits in the sandbox; `run_program.py`, `run_check.py`.
"""
