"""What is wrong with a run, told from its folder: evidence, commonest causes, what to try."""
