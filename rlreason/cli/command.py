"""Run the command line of runs: check its words, have Hydra compose and start what they ask for, exit with its code.

Heavy libraries are imported when a checked run starts, so that `--help` and a typo are answered quickly.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.check import check_command_line
from rlreason.cli.compose import composed_run
from rlreason.cli.flags import CONF, OneRun, Request, composing
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.subcommands import find_modules_here, print_error, refuse_wrong_subcommand, run_cli, subcommands_help
from rlreason.config.leaves import refuse_own_input
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import register, typed
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CONTENTS, LOG, STACKS, SUMMARY
from rlreason.records.provenance import Origin
from rlreason.records.reader import RunFolder, ending, exit_code, known_status, read_status, write_status, written_at
from rlreason.records.writer import RunWriter, finish_provenance, refuse_taken
from rlreason.runtime import signals
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import ended_when_it_hangs, run_lock
from rlreason.runtime.machine import (
    SWEEP_VARIABLE,
    loading,
    place_of,
    process_state_kept,
    seed_generators,
)
from rlreason.runtime.streams import stderr_logged
from rlreason.runtime.text import first_line, redacted
from rlreason.sweeps.carry import why_dominated
from rlreason.sweeps.design import key_of
from rlreason.sweeps.launcher import JOBLIB
from rlreason.sweeps.processes import CONSOLES, end_with_sweep, outcome_text, printing_to
from rlreason.sweeps.state import DOMINATED, FILE


def run_job(
    run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, own_process: bool = False
) -> float:
    """Run what the settings say, leave everything in `folder`, return the accuracy.

    `config`: the settings as text for the folder; `words`: the command line that starts this run. An early end is
    written to its status and raised. `own_process`: this process exists only for the run, and ends if that hangs.
    """
    refuse_own_input(run, folder, CONTENTS)
    with run_lock(folder, console.say):  # errors are handled inside: nothing may be written to another run's folder
        before = written_at(folder)
        try:
            limit_s = run.waits.run_s if own_process else None
            leaving = signals.before_leaving(lambda: mark_ended(folder, KeyboardInterrupt()))
            with ended_when_it_hangs(folder / STACKS, limit_s), leaving:
                return _work(run, folder, config, words, console, own_process)
        except BaseException as error:
            if signals.stop_signal() and not isinstance(error, KeyboardInterrupt):
                error = KeyboardInterrupt()
            elif works_on_a_model(run) and isinstance(error, Exception):
                from rlreason.training.preflight import out_of_memory

                if (shortage := out_of_memory(run, error)) is not None:
                    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as log:
                        log.write(redacted("".join(traceback.format_exception(error))))
                    shortage.__cause__ = error
                    error = shortage
            if written_at(folder) != before:  # the folder became this run's own
                with suppress(OSError):  # a full disk must not hide the error
                    mark_ended(folder, error)
                    finish_provenance(folder)
            raise error


def _work(
    run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, own_process: bool
) -> float:
    """Load what the run needs, and run it."""
    clock, sources = Clock(), dict[str, str]()
    start: Callable[..., float]
    libraries = "torch and transformers" if works_on_a_model(run) else "the client and the sandbox"
    with console.wait(f"loading {libraries}"), loading(for_good=own_process):
        if not works_on_a_model(run):
            from rlreason.discovery.loop import discover as start
        elif run.trains:
            from rlreason.training.train import train as start
        else:
            from rlreason.training.jobs import start
    if works_on_a_model(run):
        from rlreason.training.preflight import own_sources

        seed_generators(run.seed)
        sources = own_sources(run)
    records = RunWriter(folder, config, Origin(words, sources), trains=run.trains, say=console.say, clock=clock)
    accuracy = start(run, records, console)
    finish_provenance(folder)
    return accuracy


def mark_ended(folder: Path, error: BaseException) -> None:
    """Record in the folder of a run that was in progress what ended it."""
    if read_status(folder) != "running":
        return
    if (summary := RunFolder(folder).summary) is not None:  # a finished run that was given more steps
        write_status(folder, known_status(str(summary.get("status"))), str(summary.get("reason", "")))
    elif isinstance(error, KeyboardInterrupt):
        write_status(folder, "interrupted", signals.why_stopped(error))
    else:
        text = str(error).partition("\n")[0]
        named = f"{type(error).__name__}: {text}".rstrip(": ")
        write_status(folder, "failed", text if isinstance(error, ConfigError) else named)


def start_run(one: OneRun, words: Sequence[str]) -> int:
    """Run one run in this process; return its exit code. `words`: the command line that starts it."""
    HydraConfig.instance().set_config(one.of_hydra)  # names the options that were chosen
    if one.sweep:
        os.environ[SWEEP_VARIABLE] = one.sweep  # loggers group it as in the sweep
    config = redacted(OmegaConf.to_yaml(one.config, resolve=True))
    with run_lock(one.folder, lambda _: None):  # before it loads anything
        refuse_taken(one.folder, config, one.run.trains)
    with stderr_logged():
        run_job(one.run, one.folder, config, words, Console(), own_process=True)
    return ending(read_status(one.folder) or "finished").exit_code or 0


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
        watched = works_on_a_model(run) and run.monitors.dominated == "stop" and (folder.parent / FILE).exists()
        if watched and (why := why_dominated(folder)):
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
    signals.follow()
    run_cli(partial(do, sys.argv[1:]))


def do(words: Sequence[str]) -> int:
    """Check the words, then answer them or start what they request; return the exit code."""
    refuse_wrong_subcommand(words)
    register()
    OmegaConf.register_new_resolver("subcommands", subcommands_help, replace=True)  # for --help: conf/config.yaml
    request = check_command_line(words, design=False)
    if request.one is not None and request.starts:
        return start_run(request.one, words)
    if request.one is not None:  # of a run that resumes: Hydra does not compose it
        print(OmegaConf.to_yaml(request.one.config), end="")
        return 0
    if request.starts and place_of():
        raise ConfigError("-m with torchrun: each run of a sweep starts its own ranks: leave torchrun out, add gpus=2")
    with mistakes_in(words):
        return by_hydra(request)


def by_hydra(request: Request) -> int:
    """Have Hydra answer checked words, or run their sweep; return the exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors are raised instead of being printed
    before, asked = sys.argv, request.for_hydra()
    try:
        sys.argv = [before[0], *asked]
        hydra.main(config_path=CONF, config_name=request.config_name, version_base="1.3")(sweep_job)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as raised:
        if not request.composes:
            raise ConfigError(f"{' '.join(asked)} has no answer ({first_line(raised)}): see --hydra-help") from raised
        with composing(request), in_one_line(request.overrides, request.config_name, not request.starts):
            raise
    finally:
        sys.argv = before
    if request.flags.keys() & {"cfg", "info"}:
        with composing(request), in_one_line(request.overrides, request.config_name):
            composed_run(request.overrides, request.config_name)  # what is wrong with it is said behind the config
    return 0
