"""Run untrusted programs: by bwrap or unshare where they work, within limits, ending all their processes.

`contained.py` is this side. The other side are two scripts that import nothing of this package: `warden.py`, which ends
all processes, and `inside.py`, which sets limits in the sandbox and runs the program.
"""
