"""What this machine can do, and whether a run of given settings fits: findings with their cures, before a run."""
