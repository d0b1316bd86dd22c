"""Peking University, homework 3: the functions of CS336's 2025 assignment under the same names."""

from rlreason.courses.cs336_2025 import *  # noqa: F403
from rlreason.courses.cs336_2025 import __all__ as __all__
