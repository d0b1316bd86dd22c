"""Rollout engines: token ids in, sampled token ids with their log-probabilities out."""
