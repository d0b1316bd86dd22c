"""The version of rlreason, which the wheel has too."""

__version__ = "0.1.0"
