"""Run the command line of runs: compose the config, check it, run one run per process, exit with the run's code.

Hydra starts jobs only from here. Heavy libraries are imported when a checked run starts, so that `--help` and a typo
are answered quickly.
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

from rlreason.cli.check import check_command_line, check_rules
from rlreason.cli.entry import run_cli
from rlreason.cli.flags import Request, composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.queries import answer, rerun_config
from rlreason.cli.resume import expand_resume
from rlreason.cli.run import run_job
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
from rlreason.runtime.machine import SWEEP_VARIABLE, place_of
from rlreason.runtime.streams import stderr_logged
from rlreason.runtime.text import redacted
from rlreason.sweeps.runner import PATIENCE_S


class Ended(BaseException):
    """Carries the error that ended a job past Hydra's runner, which would print it in its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def main(cfg: DictConfig, words: Sequence[str] = ()) -> float:
    """Run one job: a whole run, or, inside a sweep, the start of a process of its own.

    `words`: the command line that starts the run.
    """
    try:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            return start_sweep_run(cfg)
        with stderr_logged():
            return job(cfg, words)
    except Exception as error:  # KeyboardInterrupt passes Hydra by itself
        if signals.stop_signal():  # a failure caused by the end of the process is no error of its own
            raise KeyboardInterrupt from None
        raise Ended(error) from error


def job(cfg: DictConfig, words: Sequence[str]) -> float:
    """Run in this process, and exit it if the run's status has an exit code of its own."""
    run = typed(cfg, of_sweep=SWEEP_VARIABLE in os.environ)
    config = redacted(OmegaConf.to_yaml(cfg, resolve=True))
    folder = Path(HydraConfig.get().runtime.output_dir)
    hide_in_hydras_files(folder)
    accuracy = run_job(run, folder, config, words, Console(), own_process=True)
    if code := ending(read_status(folder) or "finished").exit_code:
        sys.exit(code)
    return accuracy


def hide_in_hydras_files(folder: Path) -> None:
    """Redact secrets in Hydra's own record of the settings and overrides, which it writes before a run begins."""
    for path in (folder / HYDRA).glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if (plain := redacted(text)) != text:
            path.write_text(plain, encoding="utf-8")


def cli() -> None:
    """Run the command line and end the process. A user's mistake: exit code 2."""
    signals.follow()
    of_sweep = SWEEP_VARIABLE in os.environ
    # A sweep waits longer than its run may take; the SIGTERM that it passes on to the run is no second signal there.
    command = partial(do, sys.argv[1:])
    run_cli(command, patient=(signal.SIGTERM,)) if of_sweep else run_cli(command, limit_s=PATIENCE_S + 10)


def do(words: Sequence[str]) -> int:
    """Check the words, then answer them or start what they request; return the exit code.

    `resume=RUN` among them stands for the words that started RUN.
    """
    with mistakes_in(words):
        refuse_wrong_subcommand(words)
        register()
        OmegaConf.register_new_resolver("subcommands", subcommands_help, replace=True)  # for --help: conf/config.yaml
        resumed = expand_resume(words)
        words = resumed.words
        if resumed.sweep:
            os.environ[SWEEP_VARIABLE] = resumed.sweep  # settings are checked and loggers group it as in the sweep
    with mistakes_in(words):
        question = not read(words).starts
        note = partial(print, file=sys.stderr if question else sys.stdout)
        for line in resumed.notes:
            note(f"note: {line}")
        request = check_command_line(words, note)
        try:
            with (
                composing(request) as hydra,
                in_one_line(request.overrides, request.config_name, composing=not request.starts),
            ):
                return start_runs(hydra, request, words) if request.starts else answer_question(request)
        except Ended as end:
            error = end.error
        raise error  # with its own cause and traceback


def start_runs(hydra: Hydra, request: Request, words: Sequence[str]) -> int:
    """Start the run or the sweep; return the exit code."""
    if request.multirun and place_of():
        raise ConfigError("-m with torchrun: each run of a sweep starts its own ranks: leave torchrun out, add gpus=2")
    if request.multirun:
        return start_sweep(hydra, request, main)
    assert request.folder is not None
    if request.folder.is_dir():
        refuse_folder(request, request.folder)
    hydra.run(request.config_name, partial(main, words=words), [*request.overrides, "hydra.mode=RUN"])
    return 0


def refuse_folder(request: Request, folder: Path) -> None:
    """Refuse a folder that belongs to another run, before Hydra writes its own files there."""
    cfg = compose(request.config_name, list(request.overrides))
    run = typed(cfg, of_sweep=SWEEP_VARIABLE in os.environ)
    with run_lock(folder, lambda _: None):
        refuse_taken(folder, redacted(OmegaConf.to_yaml(cfg, resolve=True)), run.trains)


def answer_question(request: Request) -> int:
    """Answer a command line that starts no runs; return the exit code."""
    if file := request.flags.get("experimental_rerun"):
        main(rerun_config(file), sys.argv[1:])
        return 0
    answer(request)
    if request.flags.keys() & {"cfg", "info"}:
        check_rules(request)  # after the config, also print what is wrong with it
    return 0
