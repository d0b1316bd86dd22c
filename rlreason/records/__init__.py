"""The run folder and the terminal: what a run writes, how it ended, and what is printed meanwhile."""
