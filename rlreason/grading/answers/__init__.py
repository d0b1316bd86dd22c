"""Answers: from text to a value, and from two values to a verdict. Pure functions: no process, no reward, no torch."""
