"""Parse answers into values and compare two values. Pure functions: no process, no reward, no torch."""
