"""Turn a command line into a run, a sweep or a subcommand.

Overrides are parsed (flags.py), translated (aliases.py), composed by Hydra and checked (check.py) before anything slow
is loaded; errors become one line with a suggestion (mistakes.py, suggestions.py). command.py then starts a run (run.py)
or a sweep (start_sweep.py); subcommands.py dispatches the rest.
"""
