"""`rlreason ...` and `python -m rlreason ...`: subcommands read runs, overrides start them.

Nothing slow is imported before the signal handlers are in place, and a subcommand imports neither Hydra's command line
nor torch (except `rerun`, which starts a run). Of several processes that train together, the others follow rank 0.
"""

import os
import signal
import sys
from importlib.util import find_spec

from rlreason.runtime.machine import VISIBLE, Place, divide_memory_finely, own_gpu, place_of
from rlreason.runtime.signals import SIGNALS, heed_signals, killed_with_parent


def main() -> None:
    """Run the command line and end the process with its exit code."""
    place = place_of()
    if place is None:
        run()
    elif place.rank:
        sys.exit(serve(place))
    else:
        killed_with_parent(signal.SIGTERM)  # it ends in order when torchrun does
        try:
            run()
        finally:
            from rlreason.training.distributed import release_torchrun_ranks

            release_torchrun_ranks()  # which end if no training run was started


def run() -> None:
    """Run the command line in the only process of the command, or in the first of several."""
    heed_signals()
    if missing := [name for name in ("hydra", "torch", "transformers") if find_spec(name) is None]:
        print(
            f"rlreason: {sys.executable} has no {', '.join(missing)}: activate the environment that rlreason is "
            "installed in (after make demo: source .venv/bin/activate)",
            file=sys.stderr,
        )
        sys.exit(2)
    divide_memory_finely()  # torch reads it when it is imported, here or in a process that is started from here
    from rlreason.cli.subcommands import named_subcommand, run_subcommand
    from rlreason.records.console import run_cli

    if subcommand := named_subcommand(sys.argv[1:]):
        run_cli(lambda: run_subcommand(subcommand, sys.argv[2:]))
    from rlreason.cli.command import cli

    cli()


def serve(place: Place) -> int:
    """Follow rank 0 to the end of its run; return the exit code."""
    killed_with_parent()  # it has nothing to clean up
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rlreason.runtime.plugins import find_modules_here

    find_modules_here()
    divide_memory_finely()
    os.environ[VISIBLE] = own_gpu(os.environ.get(VISIBLE), place.local)  # before anything loads CUDA
    from rlreason.training.distributed import follow

    return follow(place)


if __name__ == "__main__":
    main()
