"""What a user's mistake is called. Imported by every room; imports nothing."""


class ConfigError(Exception):
    """A mistake in what was asked for. Its text names the setting, its value, the rule and the cure.

    The command line prints the text alone, without a traceback, and exits with a code other than 0.
    """


class EngineError(ConfigError):
    """The rollout engine died, hung or does not hold the trainer's weights. What was recorded stays in the folder."""
