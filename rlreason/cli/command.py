"""Run the command line of runs: check its words, have Hydra compose and start what they ask for, exit with its code.

Heavy libraries are imported when a checked run starts, so that `--help` and a typo are answered quickly.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.check import check_command_line
from rlreason.cli.compose import composed_run
from rlreason.cli.flags import CONF, OneRun, composing, with_newest
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.subcommands import refuse_wrong_subcommand, subcommands_help
from rlreason.config.run import works_on_a_model
from rlreason.config.store import register, typed
from rlreason.errors import ConfigError
from rlreason.main import run_job
from rlreason.records.console import Console, print_error, run_cli
from rlreason.records.files import SUMMARY
from rlreason.records.reader import RunFolder, exit_code, exit_code_of_status, read_status, write_status
from rlreason.runtime import signals
from rlreason.runtime.machine import (
    SWEEP_VARIABLE,
    place_of,
    process_state_kept,
)
from rlreason.runtime.plugins import find_modules_here
from rlreason.runtime.streams import stderr_logged
from rlreason.runtime.text import first_line, redacted
from rlreason.sweeps.design import key_of
from rlreason.sweeps.launcher import CONSOLES, JOBLIB, end_with_sweep, outcome_text, printing_to
from rlreason.sweeps.state import DOMINATED, FILE


def start_run(one: OneRun, words: Sequence[str]) -> int:
    """Run one run in this process; return its exit code. `words`: the command line that starts it."""
    if one.sweep:
        os.environ[SWEEP_VARIABLE] = one.sweep  # loggers group it as in the sweep
    config = redacted(OmegaConf.to_yaml(one.config, resolve=True))
    with stderr_logged():
        run_job(one.run, one.folder, config, words, Console(), own_process=True)
    return exit_code_of_status(read_status(one.folder) or "finished") or 0


def sweep_job(cfg: DictConfig) -> float:
    """Run one run of a sweep, in whatever process its launcher has chosen; a finished one only returns its accuracy.

    What is raised can be pickled.
    """
    register()  # a launcher's process has only imported this program
    find_modules_here()
    end_with_sweep()
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    os.environ[SWEEP_VARIABLE] = folder.parent.name
    if hydra_config.runtime.choices["hydra/launcher"] != JOBLIB:
        return _sweep_run(cfg, folder, own_process=True)
    print(f"== {folder.name}: started", flush=True)  # joblib's processes run several jobs
    try:
        with printing_to(folder.parent / CONSOLES / f"{folder.name}.log"), process_state_kept():
            return _sweep_run(cfg, folder, own_process=False)
    finally:
        print(f"== {folder.name}: {outcome_text(folder.parent, folder.name)}", flush=True)


def _sweep_run(cfg: DictConfig, folder: Path, own_process: bool) -> float:
    hydra_config = HydraConfig.get()
    sources = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    words = [*(f"--config-dir={path}" for path in sources), *hydra_config.overrides.task]
    words.append(f"hydra.run.dir={os.path.relpath(folder)}")
    try:
        run = typed(cfg, map(key_of, hydra_config.overrides.task))
        if (folder / SUMMARY).exists() or read_status(folder) == DOMINATED:  # a sweep of ours has checked its settings
            return float((RunFolder(folder).summary or {}).get("accuracy") or "nan")
        if works_on_a_model(run) and run.monitors.dominated == "stop" and (folder.parent / FILE).exists():
            from rlreason.report.carry import why_dominated  # slow to import

            if why := why_dominated(folder):
                write_status(folder, DOMINATED, why)
                print(f"stopped: {why}", flush=True)
                return float("nan")
        config = redacted(OmegaConf.to_yaml(cfg, resolve=True))
        # A sweep passes on a signal that has reached its runs.
        with signals.stoppable(patient=(signal.SIGTERM,)), stderr_logged():
            return run_job(run, folder, config, words, Console(), own_process)
    except KeyboardInterrupt as error:
        print_error(error)
        signals.leave(exit_code(error))  # the process: a launcher's would wait for further jobs
    except Exception as error:
        if not print_error(error):
            traceback.print_exc()
        with suppress(OSError):  # nothing was written there
            folder.rmdir()
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise RuntimeError(text) from None


def cli() -> None:
    """Run the command line and end the process. A user's mistake: exit code 2."""
    run_cli(partial(do, sys.argv[1:]))


def do(words: Sequence[str]) -> int:
    """Check the words, then answer them or start what they request; return the exit code."""
    words = list(map(with_newest, words))
    refuse_wrong_subcommand(words)
    register()
    OmegaConf.register_new_resolver("subcommands", subcommands_help, replace=True)  # for --help: conf/config.yaml
    request = check_command_line(words)
    if request.one is not None and request.starts:
        return start_run(request.one, words)
    if request.one is not None:  # of a run that resumes: Hydra does not compose it
        print(OmegaConf.to_yaml(request.one.config), end="")
        return 0
    if request.starts and place_of():
        raise ConfigError("-m with torchrun: each run of a sweep starts its own ranks: leave torchrun out, add gpus=2")
    before, overrides = sys.argv, request.overrides
    asked = [] if "hydra_help" in request.flags else list(overrides)  # which shows no run's settings
    for name, value in request.flags.items():
        if name != "config_dir":  # whose place `composing` has set
            asked.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors are raised instead of being printed
    try:
        sys.argv = [before[0], *asked]
        hydra.main(config_path=CONF, config_name=request.config_name, version_base="1.3")(sweep_job)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as raised:
        if request.starts:
            raise
        if not request.composes:
            raise ConfigError(f"{' '.join(asked)} has no answer ({first_line(raised)}): see --hydra-help") from raised
        with composing(request), in_one_line(overrides, request.config_name):
            raise
    finally:
        sys.argv = before
    if request.flags.keys() & {"cfg", "info"}:
        with composing(request):
            composed_run(overrides, request.config_name)  # what is wrong with it is said behind the config
    return 0
