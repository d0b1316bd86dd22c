"""Grading processes: a pool with limits on time and memory, for what cannot be graded in this process."""
