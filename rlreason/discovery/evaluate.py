"""`python -m rlreason.discovery.evaluate PROGRAM`: `rlreason score PROGRAM` under the name that courses look for."""

import sys

from rlreason.cli.entry import run_cli
from rlreason.cli.verbs import named_verb, run_verb


def main() -> None:
    """Score what the command line names and end the process."""
    verb = named_verb(["score"])
    assert verb is not None
    run_cli(lambda: run_verb(verb, sys.argv[1:]))


if __name__ == "__main__":
    main()
