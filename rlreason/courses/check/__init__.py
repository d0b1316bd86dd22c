"""`rlreason check MODULE`: somebody's own functions or train loop of a handout, held against ours.

The right answers are those of `rlreason.courses`. `wrong/` holds families of known mistakes: whichever of them gives
what the user's function gives, on every trial, names the bug. Imports nothing: `check` starts without torch.
"""
