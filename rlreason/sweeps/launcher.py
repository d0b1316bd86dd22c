"""Choose and set up the launcher of a sweep, hand out the GPUs of this machine, and run the jobs.

Ours runs them in processes of this machine, forked from one that has loaded their libraries.
"""

import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import RunMode
from omegaconf import open_dict

from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.records.files import Note
from rlreason.records.reader import RunFolder, read_status, write_status
from rlreason.runtime import signals
from rlreason.runtime.machine import (
    GPUS_VARIABLE,
    VISIBLE,
    place_sockets,
    query_driver,
    shares,
    torch_has_gpus,
    usable_processors,
)
from rlreason.runtime.signals import heed_signals
from rlreason.runtime.text import few, first_line, visible
from rlreason.sweeps.state import RunState, refreshed

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Grid, Processes

GROUP = "hydra/launcher"
PROCESSES, JOBLIB, LOCAL, SLURM = "processes", "joblib", "submitit_local", "submitit_slurm"
HERE = (PROCESSES, JOBLIB, LOCAL)  # that start their runs on this machine
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit's default is an hour
TIMEOUTS = 10  # times that a job of Slurm is queued again when its time is over: its run resumes
#: Processors and gigabytes of memory for each GPU of a run, and for a run without one. Slurm's default: one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)
THREADS = "OMP_NUM_THREADS"  # libraries read it as they are loaded
SETTINGS = "gpus, rollout.gpus, rollout.placement"
DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.")  # Hydra's settings that a design sets
#: Modules that every run needs. Importing them starts no thread and asks no GPU for anything.
PRELOADED = (
    "rlreason.cli.command", "rlreason.training.train", "rlreason.training.jobs", "rlreason.training.preflight",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
PARENT = "RLREASON_SWEEP_PROCESS"  # environment: the id of the process of the sweep, with which its jobs end
CONSOLES = "console"  # in a sweep's folder: a file for what each run printed, where several run at a time
PATIENCE_S = 130.0  # for runs that were sent SIGTERM to end their step and clean up


def machine_gpus(note: Note = print) -> list[str]:
    """Return the GPUs that runs started here may use, as CUDA_VISIBLE_DEVICES would name them.

    Those of RLREASON_GPUS if it is set; else those of CUDA_VISIBLE_DEVICES, or all that NVIDIA's driver lists.
    """
    named = os.environ.get(GPUS_VARIABLE, os.environ.get(VISIBLE) if torch_has_gpus() else "")
    if named is None:
        driver = query_driver()
        if driver.failure:
            note(f"note: {driver.failure}: the runs of this sweep are given no GPUs of their own")
        return [str(number) for number in range(len(driver.gpus))]
    names = map(str.strip, named.split(","))
    return list(dict.fromkeys(itertools.takewhile(lambda name: name and not name.startswith("-"), names)))


def gpus_needed(run: AnyRunConfig) -> int:
    """Return how many GPUs a run needs by its settings: for its ranks and for its engines."""
    if not works_on_a_model(run):
        return 0
    engines = run.rollout.gpus if run.rollout.engine == "vllm" else 1
    second = run.rollout.placement == "second_gpu"
    return run.ranks_requested + engines if second else max(run.ranks_requested, engines)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep."""

    launcher: str = PROCESSES
    side_by_side: int = 1  # runs at a time
    words: Sequence[str] = ()  # Hydra's overrides that set up the launcher


def jobs_of(
    words: Sequence[str],
    runs: Sequence[AnyRunConfig],
    jobs: int | None,
    per_run: int | None,
    note: Note,
    absent: list[str] | None = None,
) -> Jobs:
    """Set up the launcher that the overrides choose for these runs, `jobs` at a time, with `per_run` GPUs each.

    None: as many as the GPUs suffice for, and as many GPUs as the neediest run asks for; without GPUs, ours runs one at
    a time, others as many as there are processors. `ConfigError`, or a line in `absent`, for GPUs that are not there.
    """
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    launcher, needed = given.get(GROUP, PROCESSES), max(map(gpus_needed, runs))
    gpus, each = machine_gpus(note) if launcher in HERE else [], needed if per_run is None else per_run
    wrong = ""
    if per_run and launcher in (JOBLIB, LOCAL):
        wrong = f"gpus_per_run={per_run}: {GROUP}={launcher} hands out no GPUs: leave one of them out"
    elif per_run and per_run < needed:
        wrong = f"gpus_per_run={per_run}: a run of this sweep asks for {needed} GPUs ({SETTINGS}): raise it to that"
    elif launcher == PROCESSES and (per_run or gpus) and each > len(gpus):
        wrong = (
            f"a run of this sweep asks for {each} GPUs ({SETTINGS}, gpus_per_run), and this machine has {len(gpus)} "
            f"for runs ({few(gpus, 16) or 'none'}): ask for fewer, or use other machines ({GROUP}={SLURM})"
        )
    if wrong:
        if absent is None:
            raise ConfigError(wrong)
        absent.append(wrong)
        gpus = []
    width, own = jobs or 1, dict[str, Any]()
    at_once = min(jobs or (1 if gpus else usable_processors()), len(runs))
    if launcher == PROCESSES:
        most = len(gpus) // each if gpus and each else jobs or 1
        width = min(jobs or most, most, len(runs))
        own = {"jobs": width, "gpus": gpus if each else [], "gpus_per_run": each}
        if any(works_on_a_model(run) and run.rollout.engine == "vllm" for run in runs):
            own["preload"] = "false"  # vLLM decides by the GPUs that there are as it is loaded
    elif launcher == JOBLIB:
        own = {"n_jobs": int(given.get("hydra.launcher.n_jobs", at_once))}
        width = own["n_jobs"] if own["n_jobs"] > 0 else usable_processors()
    elif launcher == LOCAL:  # it hides the GPUs from its jobs unless told how many
        width, own = at_once, {"timeout_min": WEEK} | ({"gpus_per_node": len(gpus)} if gpus else {})
    elif launcher == SLURM:  # whose machines are assumed to be like this one
        width, n = min(jobs or len(runs), len(runs)), each if per_run or torch_has_gpus() else 0
        processors, memory = WITH_GPU if n else WITHOUT
        own = {"timeout_min": DAY, "max_num_timeout": TIMEOUTS}
        own |= {"cpus_per_task": processors * max(1, n), "mem_gb": memory * max(1, n)}
        if n and not given.keys() & {"hydra.launcher.gres", "hydra.launcher.gpus_per_task"}:  # not requested already
            own["gpus_per_node"] = n
        own |= {"array_parallelism": jobs} if jobs else {}
    settings = {f"hydra.launcher.{key}": value for key, value in own.items()}
    words = [f"{key}={value}" for key, value in settings.items() if key not in given]
    return Jobs(launcher, width, words)


def launched(
    grid: "Grid", words: Sequence[str], jobs: Jobs, folder: Path, left: Sequence[RunState]
) -> dict[str, Exception | None]:
    """Have the launcher run what is left of a sweep; return the error of each job, by the name of its run."""
    of_hydra = [word for word in words if word.startswith(("hydra.", "hydra/")) and not word.startswith(DESIGNED)]
    if jobs.launcher == PROCESSES and sys.stdout.isatty():  # which shows a line for each run instead
        of_hydra.insert(0, "hydra.launcher.quiet=true")  # a typed one wins
    of_hydra += [*left[0].overrides, *jobs.words, f"hydra.sweep.dir='{folder}'", "hydra.mode=MULTIRUN"]
    if jobs.launcher in HERE:
        os.environ[PARENT] = str(os.getpid())
        if jobs.side_by_side > 1:
            threads, own = max(1, usable_processors() // jobs.side_by_side), os.environ.get(THREADS, "")
            os.environ[THREADS] = str(min(int(own), threads) if own.isdecimal() and int(own) else threads)
    every = [[*run.overrides, f"hydra.sweep.subdir='{run.name}'"] for run in left]
    size, results = jobs.side_by_side if jobs.launcher == LOCAL else len(every), list[Any]()  # that starts all at once
    try:
        config = grid.hydra_context.config_loader.load_configuration(
            grid.config.hydra.job.config_name, of_hydra, run_mode=RunMode.MULTIRUN
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=grid.hydra_context, task_function=grid.task_function, config=config
        )
        for first in range(0, len(every), size):
            results += launcher.launch(every[first : first + size], initial_job_idx=first)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={jobs.launcher} cannot be loaded ({error}): install its package") from None
    except Exception as error:  # joblib and submitit give up when the process of one run is killed
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        print(f"! {jobs.launcher} gave up: {type(error).__name__}: {first_line(error)}", flush=True)
        return {run.name: error for run in left}
    return {run.name: failure(result) for run, result in zip(left, results, strict=True)}


# Jobs in processes of this machine


class _Job(NamedTuple):
    name: str
    overrides: Sequence[str]
    number: int
    console: Path | None  # where it prints; None: as its sweep
    gpus: Sequence[str]  # that it sees; none: all
    processors: Sequence[int]  # that it may use; none: all


def launch(launcher: "Processes", job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
    """Run the jobs, as many at a time as the launcher says, and return Hydra's result of each, in their order.

    A job that fails does not affect the others. On KeyboardInterrupt all are stopped in order first.
    """
    import cloudpickle  # slow to import

    folder = Path(launcher.config.hydra.sweep.dir)
    shared = cloudpickle.dumps((launcher.hydra_context, launcher.config, launcher.task_function, Singleton.get_state()))
    place_sockets()
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED) if launcher.preload else [])
    resource_tracker.ensure_running()  # which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)  # none ends the server before its processes
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    free, running, results = places(launcher), dict[int, tuple[_Job, Any, Connection]](), dict[int, Any]()
    waiting = list(enumerate(job_overrides, first))
    try:
        while waiting or running:
            while waiting and free:
                number, overrides = waiting.pop(0)
                named = [word for word in overrides if word.startswith("hydra.sweep.subdir=")] or [f"={number}"]
                name = named[-1].partition("=")[2].strip("'")  # its folder: Hydra's is its number
                console = folder / CONSOLES / f"{name}.log" if launcher.quiet else None
                job = _Job(name, overrides, number, console, *free.pop(0))
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_job, args=(job, sender, shared))
                with signals.held():  # else a job could start and stay unknown
                    process.start()
                    running[process.sentinel] = job, process, receiver
                sender.close()
                on = f" on GPU {', '.join(job.gpus)}" if job.gpus else ""
                print(f"{'' if launcher.quiet else chr(10)}== {name}: started{on}", flush=True)
            for sentinel in connection.wait(list(running)):
                job, process, receiver = running.pop(sentinel)  # type: ignore[arg-type]
                free.append((job.gpus, job.processors))
                process.join()
                result, code = JobReturn(overrides=list(job.overrides)), process.exitcode
                try:
                    result.status, result.return_value = receiver.recv()
                except EOFError:
                    why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    result.status, result.return_value = JobStatus.FAILED, RuntimeError(why)
                    if read_status(folder / job.name) == "running":
                        write_status(folder / job.name, "failed", why)
                receiver.close()
                results[job.number] = result
                text = f"{outcome_text(folder, job.name, result)}; {len(results)} of {len(job_overrides)} done"
                if job.console and failure(result):
                    text += f"; it printed into {job.console}"
                print(f"== {job.name}: {visible(text)}", flush=True)
    except BaseException:
        signals.arrived()
        if running and launcher.quiet:
            print("stopping the runs, each at the end of its step (a second signal ends them at once)", flush=True)
        for _, process, _ in running.values():
            process.terminate()  # no second signal to a run of a sweep that Ctrl-C has reached already
        until = monotonic() + PATIENCE_S
        for _, process, _ in running.values():
            process.join(max(0.0, until - monotonic()))
            process.kill()
        raise
    return [results[number] for number in sorted(results)]


def places(launcher: "Processes") -> list[tuple[Sequence[str], Sequence[int]]]:
    """Return the GPUs and processors of each job that may run at a time."""
    each, gpus, allowed = launcher.gpus_per_run, launcher.gpus, list[int]()
    count = min(launcher.jobs, max(1, len(gpus) // each)) if gpus and each else launcher.jobs
    if count > 1 and hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    processors = shares(allowed, count)
    return [(gpus[k * each : (k + 1) * each], processors[k]) for k in range(count)]


def outcome_text(folder: Path, name: str, result: Any = None) -> str:
    """Return the outcome of a run in a few words, by its folder, or by Hydra's result of a job that has left none."""
    run = refreshed(RunState(name, [], {}, 0), folder, lambda _: None)
    if result is not None and not run.of_its_own and (error := failure(result)):
        return f"failed ({first_line(error)})"
    before = "" if run.accuracy_before is None else f"{run.accuracy_before:.3f} -> "
    figure = "" if run.accuracy is None else f"accuracy {before}{run.accuracy:.3f}, "
    counts = ((RunFolder(folder / name, lambda _: None).summary or {}).get("notices") or {}).values()
    notices = f", notices: {sum(counts)}" if counts else ""
    return f"{figure if run.score is None else f'score {run.score:g}, '}{run.status_text}{notices}"


def failure(result: Any) -> Exception | None:
    """Return the error of a job of Hydra's, None where it succeeded."""
    value = result._return_value  # its property prints the error and raises it
    return value if isinstance(value, Exception) else None


def _run_job(job: _Job, sender: Connection, shared: bytes) -> None:
    """Have Hydra run one job, in its own process. `shared`: what all jobs of the sweep need."""
    import cloudpickle

    heed_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.SIGNALS)
    if job.gpus:
        os.environ[VISIBLE] = ",".join(job.gpus)
    if job.processors:
        os.sched_setaffinity(0, job.processors)
    try:
        with printing_to(job.console):
            context, config, task, singletons = cloudpickle.loads(shared)
            Singleton.set_state(singletons)
            setup_globals()
            job_config = context.config_loader.load_sweep_config(config, list(job.overrides))
            with open_dict(job_config):
                job_config.hydra.job.id, job_config.hydra.job.num = str(job.number), job.number
            HydraConfig.instance().set_config(job_config)
            result = run_job(
                hydra_context=context, task_function=task, config=job_config, job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )  # fmt: skip
            sender.send((result.status, result._return_value))
    except KeyboardInterrupt:
        signals.leave(130)


@contextmanager
def printing_to(path: Path | None) -> Iterator[None]:
    """Add what this process prints in the block to a file; None: leave its streams alone."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    streams = [(stream, number, os.dup(number)) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
    with path.open("ab") as file:
        for stream, number, _ in streams:
            stream.flush()
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for stream, number, before in streams:
            stream.flush()
            os.dup2(before, number)
            os.close(before)


def end_with_sweep() -> None:
    """Send this job SIGTERM when the process of its sweep on this machine has ended in whatever way. Linux only."""
    parent = int(os.environ.get(PARENT) or os.getpid())

    def wait_for_end() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(parent)], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    if parent != os.getpid() and hasattr(os, "pidfd_open"):
        threading.Thread(target=wait_for_end, daemon=True).start()
