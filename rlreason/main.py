"""The entry point of a run: `cli`, which `python -m rlreason` calls, checks the command line and starts its runs.

A run is built by `training/build.py`, around one rollout engine and one grader, and started by `cli/command.py`.
"""

from rlreason.cli.command import cli, do

__all__ = ["cli", "do"]
