"""The settings of runs: typed keys, the rules between them, and their registration with Hydra."""
