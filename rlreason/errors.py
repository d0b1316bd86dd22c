"""The errors that end a command with one line and an exit code. Every package may import them."""


class ConfigError(Exception):
    """A setting that cannot be used. The text names the setting, its value, the rule and the cure.

    The command line prints the text alone, without a traceback, and exits with `exit_code` (table: records/reader.py).
    """

    exit_code = 2


class Absent(str):
    """A message about something missing on this machine; a plan of runs on another machine prints and ignores it."""

    __slots__ = ()


class DataError(ConfigError):
    """Data that cannot be used: broken rows, problems without a ground truth, nothing left."""

    exit_code = 3


class EngineError(ConfigError):
    """The rollout engine died, hung or does not have the trainer's weights. The run folder keeps its records."""

    exit_code = 1


class WaitError(ConfigError):
    """A wait for another process exceeded its limit. The run can resume later."""

    exit_code = 1


class ResourceError(ConfigError):
    """Too little memory or disk for the run."""

    exit_code = 4


class UnwritableError(ConfigError, OSError):
    """A file could not be written; `exit_code` is that of `ResourceError` where the disk is full."""


class ReaderGone(KeyboardInterrupt):
    """The reader of the output has closed it, as `| head` does: the command ends without a message, as by a signal."""

    exit_code = 141  # what a shell shows for a command that SIGPIPE ended
