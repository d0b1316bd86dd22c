"""The entry point of a run: `cli` is what `python -m rlreason` calls; it checks the words and starts what they ask for.

A run is put together by `training/build.py`, around one rollout engine and one grader, and started by `cli/run.py`.
"""

from rlreason.cli.command import cli, do, main

__all__ = ["cli", "do", "main"]
