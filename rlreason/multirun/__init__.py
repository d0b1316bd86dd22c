"""Sweeps as the command line starts them: what was asked for, put together with what runs it."""
