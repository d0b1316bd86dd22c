"""Find what goes wrong in a run without an error, live and from its folder: evidence, causes, cures."""
