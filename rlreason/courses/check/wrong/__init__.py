"""Families of known mistakes: each function computes what a handout's would with one or two of them.

Without mistakes they compute what `rlreason.courses` does, which a test checks. They serve only to name a bug, not to
decide what is right.
"""
