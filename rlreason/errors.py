"""What a user's mistake is called. Imported by every room; imports nothing."""


class ConfigError(Exception):
    """A mistake in what was asked for. Its text names the setting, its value, the rule and the cure.

    The command line prints the text alone, without a traceback, and exits with `exit_code` (the table: `status.py`).
    """

    exit_code = 2


class DataError(ConfigError):
    """Data that was found but cannot be used: broken rows, problems without a ground truth, nothing left."""

    exit_code = 3


class EngineError(ConfigError):
    """The rollout engine died, hung or does not hold the trainer's weights. What was recorded stays in the folder."""

    exit_code = 1


class ResourceError(ConfigError):
    """Too little memory or disk for what was asked."""

    exit_code = 4


class UnwritableError(ConfigError, OSError):
    """A file that could not be written, in one line; `exit_code` is that of `ResourceError` where the disk is full."""


class ReaderGone(KeyboardInterrupt):
    """Nobody reads what is printed any more, as behind `| head`: the command ends there quietly, as by a signal."""

    exit_code = 141  # what a shell shows for a command that SIGPIPE ended
