"""`rlreason ...` and `python -m rlreason ...`: subcommands read runs, overrides start them.

Nothing slow is imported before the signal handlers are in place, and a subcommand imports neither Hydra's command line
nor torch (except `rerun`, which starts a run).
"""

import sys
from importlib.util import find_spec

from rlreason.runtime.early_signals import heed_signals
from rlreason.runtime.machine import divide_memory_finely, loading, place_of


def main() -> None:
    """Run the command line and end the process with its exit code."""
    if (place := place_of()) is None:
        return run()
    from rlreason.cli.command import leading, serve  # one of several processes that train together

    if place.rank:
        sys.exit(serve(place))
    with leading():
        run()


def run() -> None:
    """Run the command line in the only process of the command, or in the first of several."""
    heed_signals()
    divide_memory_finely()  # torch reads it when it is imported, here or in a process that is started from here
    if missing := [name for name in ("hydra", "torch", "transformers") if find_spec(name) is None]:
        print(
            f"rlreason: {sys.executable} has no {', '.join(missing)}: activate the environment that rlreason is "
            "installed in (after make demo: source .venv/bin/activate)",
            file=sys.stderr,
        )
        sys.exit(2)
    with loading():
        from rlreason.cli.subcommands import named_subcommand, run_cli, run_subcommand

    if subcommand := named_subcommand(sys.argv[1:]):
        run_cli(lambda: run_subcommand(subcommand, sys.argv[2:]))
    with loading():
        from rlreason.cli.command import cli

    cli()


if __name__ == "__main__":
    main()
