"""`python -m rlreason`, and the `rlreason` script: nothing slow is imported before signals are heeded."""

from rlreason.runtime.early_signals import heed_signals


def main() -> None:
    heed_signals()
    from rlreason.main import cli

    cli()


if __name__ == "__main__":
    main()
