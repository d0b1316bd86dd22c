"""The handouts' functions, with their names, parameters and shapes, as thin calls into `rlreason.objectives`.

`cs336_2025`, `cs336_2026` and `pku_hw3` are entry points for students who compare their own work or want to
use the library under the names they know. They hold no formula of their own.
"""
