"""The check of a train loop: a recorded run of it on a small model, and what its every update should have been."""
