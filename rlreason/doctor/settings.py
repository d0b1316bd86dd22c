"""The settings that words of a command line ask for, checked by their rules, without starting or touching anything."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlreason.config.any_run import AnyRunConfig
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.errors import ConfigError


class AskedRun(NamedTuple):
    """A run and the folder that it would write to."""

    run: RunConfig
    folder: Path


def asked_run(words: Sequence[str], verb: str, note: Callable[[str], object]) -> AskedRun:
    """The run of these words, composed and checked as a start would; `ConfigError` in one line for a mistake.

    What only a start refuses (a missing package, a full disk) is left to findings. `verb`: who asks, for messages.
    """
    from rlreason.cli.aliases import translated
    from rlreason.cli.check import quoted
    from rlreason.cli.check_runs import checked, place_of
    from rlreason.cli.choices import refuse_wrong_choices
    from rlreason.cli.flags import composing, read
    from rlreason.cli.mistakes import in_one_line, mistakes_in
    from rlreason.cli.sweep_words import without_sweep_words
    from rlreason.config.store import register

    with mistakes_in(words):
        if wrong := next((word for word in words if "=" not in word and not word.startswith(("~", "-"))), None):
            raise ConfigError(f"{wrong} is no setting of a run: write rlreason {verb} key=value ...")
        register()
        asked = read(words)
        if asked.multirun or not asked.starts:
            raise ConfigError(f"rlreason {verb} looks at one run: leave the flags out, and give each setting one value")
        with composing(asked), in_one_line(asked.overrides, asked.config_name):
            rest, _ = without_sweep_words(asked.overrides, False)
            overrides = translated(quoted(rest, False), note)
            refuse_wrong_choices(overrides)
            run: AnyRunConfig = checked(overrides, asked.config_name)
            folder = place_of(overrides, asked.config_name, "run")
    if not works_on_a_model(run):
        raise ConfigError(
            f"rlreason {verb} is about runs that load a model here, and algorithm={run.algorithm} loads none"
        )
    return AskedRun(run, folder)
