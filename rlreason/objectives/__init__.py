"""Objectives: the formulas of policy-gradient training, one pure function of tensors and plain numbers each.

`objective` is the record that says which of them a run uses. The tables, rules and card are read without torch, so that
a configuration is checked before torch is loaded; this file imports nothing for that reason.
"""
