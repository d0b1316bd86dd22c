"""Objectives: the formulas of policy-gradient training, one pure function of tensors and plain numbers each.

Import from the modules: `advantages`, `losses`, `aggregation`, `kl`, `mismatch`, `overlong`, `zero_variance`,
`entropy`, `scoring` need torch; `rules` (named objectives, rules between settings) and `card` (the formula in
words) do not. This file stays empty for that reason: the configuration imports `rules` before torch is
loaded. No module of this room knows the configuration, a tokenizer, a device or a logger.
"""
