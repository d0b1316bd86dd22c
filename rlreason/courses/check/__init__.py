"""`rlreason check MODULE` compares the user's functions or train loop of a handout with ours, and names the bugs.

The right answers are those of `rlreason.courses`; a known mistake that gives the user's answers names the bug.
"""
