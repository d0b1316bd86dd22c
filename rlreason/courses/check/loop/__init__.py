"""Check a train loop: record a run of it on a small model, and compute what every update should have been."""
