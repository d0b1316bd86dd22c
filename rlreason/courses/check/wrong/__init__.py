"""Families of known mistakes: each function computes what a handout's would with one or two of them in it.

Without any of them they compute what `rlreason.courses` does: a test holds the two together. They serve to name a bug;
nothing here decides what is right.
"""
