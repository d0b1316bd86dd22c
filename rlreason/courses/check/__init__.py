"""`rlreason check MODULE` compares the user's functions or train loop of a handout with ours, and names the bugs.

The right answers are those of `rlreason.courses`. A known mistake that gives the user's answers on every trial names
the bug. This module imports nothing, so that the command starts without torch.
"""
