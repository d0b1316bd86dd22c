"""Objectives: the formulas of policy-gradient training, each a pure function of tensors and plain numbers.

The record `objective` says which of them a run uses. Tables, rules and card work without torch, so that a configuration
is checked before torch is loaded; this file imports nothing for that reason.
"""
