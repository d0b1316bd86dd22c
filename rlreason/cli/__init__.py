"""Turn a command line into a run, a sweep or a subcommand.

Overrides are parsed (flags.py), translated (aliases.py), composed by Hydra and checked (check.py) before anything slow
is loaded; errors become one line with a suggestion (mistakes.py). command.py then starts a run or has a sweep started
(start_sweep.py); subcommands.py dispatches the rest.
"""
