"""The command line of runs: compose the config, check it, run one run per process, end with the run's own exit code.

Hydra starts jobs from here alone. Heavy libraries are imported when a checked run starts, so that `--help` and a typo
are answered at once.
"""

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra import compose
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.check import check_rules, check_words
from rlreason.cli.entry import run_cli
from rlreason.cli.flags import Asked, composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.queries import answer, rerun_config
from rlreason.cli.resume import continued
from rlreason.cli.run import ended_when_it_hangs, run_job
from rlreason.cli.start_sweep import start_sweep, start_sweep_run
from rlreason.cli.subcommands import refuse_wrong_subcommand, subcommands_help
from rlreason.config.store import register, typed
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import HYDRA
from rlreason.records.status import ending, read_status
from rlreason.records.writer import refuse_taken
from rlreason.runtime import signals
from rlreason.runtime.files import run_lock
from rlreason.runtime.hang import listen
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.process import place_of
from rlreason.runtime.streams import stderr_logged
from rlreason.runtime.text import redacted
from rlreason.sweeps.runner import PATIENCE_S


class Ended(BaseException):
    """Carries what ended a job past Hydra's runner, which would print it in its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def main(cfg: DictConfig, words: Sequence[str] = ()) -> float:
    """One job: a whole run, or, inside a sweep, the start of a process of its own.

    `words`: those of the command line that starts the run.
    """
    try:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            return start_sweep_run(cfg)
        with stderr_logged():
            return job(cfg, words)
    except Exception as error:  # KeyboardInterrupt passes Hydra by itself
        if signals.stop_signal():  # what fails because everything ends is no error of its own
            raise KeyboardInterrupt from None
        raise Ended(error) from error


def job(cfg: DictConfig, words: Sequence[str]) -> float:
    """A run in this process. It ends the process itself where its end has an exit code of its own."""
    run = typed(cfg, of_sweep=SWEEP_VARIABLE in os.environ)
    config = redacted(OmegaConf.to_yaml(cfg, resolve=True))
    folder = Path(HydraConfig.get().runtime.output_dir)
    hide_in_hydras_files(folder)
    with ended_when_it_hangs(run, folder):
        accuracy = run_job(run, folder, config, words, Console(), own_process=True)
    if code := ending(read_status(folder) or "finished").exit_code:
        sys.exit(code)
    return accuracy


def hide_in_hydras_files(folder: Path) -> None:
    """Hydra writes its own view of the settings, and the words as they were typed, before a run begins."""
    for path in (folder / HYDRA).glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if (plain := redacted(text)) != text:
            path.write_text(plain, encoding="utf-8")


def cli() -> None:
    """Do what the settings and flags on the command line ask, and end the process. A user's mistake: exit code 2."""
    signals.follow()
    listen()
    of_sweep = SWEEP_VARIABLE in os.environ
    # The sweep waits longer than its run may take; what it passes on to the run is no second signal there.
    run_cli(command, patient=(signal.SIGTERM,)) if of_sweep else run_cli(command, limit_s=PATIENCE_S + 10)


def command() -> int:
    """Do what the words of this process ask; returns the exit code."""
    return do(sys.argv[1:])


def do(words: Sequence[str]) -> int:
    """Check the words, then answer them or start what they ask for; returns the exit code.

    `resume=RUN` among them stands for the words that started RUN.
    """
    with mistakes_in(words):
        refuse_wrong_subcommand(words)
        register()
        OmegaConf.register_new_resolver("subcommands", subcommands_help, replace=True)  # for --help: conf/config.yaml
        resumed = continued(words)
        words = resumed.words
        if resumed.sweep:
            os.environ[SWEEP_VARIABLE] = resumed.sweep  # its settings are checked, and its loggers group it, as before
    with mistakes_in(words):
        question = not read(words).starts
        note = partial(print, file=sys.stderr if question else sys.stdout)
        for line in resumed.notes:
            note(f"note: {line}")
        asked = check_words(words, note)
        try:
            with (
                composing(asked) as hydra,
                in_one_line(asked.overrides, asked.config_name, composing=not asked.starts),
            ):
                return start_runs(hydra, asked, words) if asked.starts else answer_question(asked)
        except Ended as end:
            error = end.error
        raise error  # with its own cause and traceback


def start_runs(hydra: Hydra, asked: Asked, words: Sequence[str]) -> int:
    """Start the run or the sweep."""
    if asked.multirun and place_of():
        raise ConfigError("-m with torchrun: each run of a sweep starts its own ranks: leave torchrun out, add gpus=2")
    if asked.multirun:
        return start_sweep(hydra, asked, main)
    assert asked.folder is not None
    if asked.folder.is_dir():
        refuse_folder(asked, asked.folder)
    hydra.run(asked.config_name, partial(main, words=words), [*asked.overrides, "hydra.mode=RUN"])
    return 0


def refuse_folder(asked: Asked, folder: Path) -> None:
    """Refuse a folder that is another run's, before Hydra writes its own view of the settings there."""
    cfg = compose(asked.config_name, list(asked.overrides))
    run = typed(cfg, of_sweep=SWEEP_VARIABLE in os.environ)
    with run_lock(folder, lambda _: None):
        refuse_taken(folder, redacted(OmegaConf.to_yaml(cfg, resolve=True)), run.trains)


def answer_question(asked: Asked) -> int:
    """Answer a question."""
    if file := asked.flags.get("experimental_rerun"):
        main(rerun_config(file), sys.argv[1:])
        return 0
    answer(asked)
    if asked.flags.keys() & {"cfg", "info"}:
        check_rules(asked)  # the config was shown; what is wrong with it is said too
    return 0
