"""Check before a run what this machine can do and whether the run fits: findings with their cures."""
