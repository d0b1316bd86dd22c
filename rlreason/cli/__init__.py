"""Turn a command line into a run, a sweep or a subcommand.

Words are parsed (flags.py), translated (names.py), composed by Hydra or merged into the settings of an earlier run
(compose.py) and checked (check.py) before anything slow is loaded; errors become one line with a suggestion
(mistakes.py). command.py then starts a run or has a sweep started (sweep.py); subcommands.py dispatches the rest.
"""
