"""Run the jobs of a sweep in processes of this machine, forked from one that has loaded their libraries."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf import open_dict

from rlreason.runtime import signals
from rlreason.runtime.machine import VISIBLE, place_sockets, shares
from rlreason.runtime.text import duration, first_line
from rlreason.sweeps.state import RunState, refreshed

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Processes

#: Modules that every run needs. Importing them starts no thread and asks no GPU for anything.
PRELOADED = (
    "rlreason.cli.command", "rlreason.training.train", "rlreason.training.jobs", "rlreason.training.preflight",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
PARENT = "RLREASON_SWEEP_PROCESS"  # environment: the id of the process of the sweep, with which its jobs end
CONSOLES = "console"  # in a sweep's folder: a file for what each run printed, where several run at a time
PATIENCE_S = 130.0  # for runs that were sent SIGTERM to end their step and clean up


class _Job(NamedTuple):
    """What the process of a job is told."""

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

    folder, several, began = Path(launcher.config.hydra.sweep.dir), launcher.jobs > 1, time.monotonic()
    shared = cloudpickle.dumps((launcher.hydra_context, launcher.config, launcher.task_function, Singleton.get_state()))
    context = _fork_server(PRELOADED if launcher.preload else ())
    free, running, results = _places(launcher), dict[int, tuple[_Job, Any, Connection]](), dict[int, Any]()
    waiting = list(enumerate(job_overrides, first))
    try:
        while waiting or running:
            while waiting and free:
                number, overrides = waiting.pop(0)
                named = [word for word in overrides if word.startswith("hydra.sweep.subdir=")] or [f"={number}"]
                name = named[-1].partition("=")[2].strip("'")  # its folder: Hydra's is its number
                console = folder / CONSOLES / f"{name}.log" if several else None
                job = _Job(name, overrides, number, console, *free.pop(0))
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_job, args=(job, sender, shared))
                with signals.held():  # else a job could start and stay unknown
                    process.start()
                    running[process.sentinel] = job, process, receiver
                sender.close()
                on = f" on GPU {', '.join(job.gpus)}" if job.gpus else ""
                print(f"{'' if several else chr(10)}== {name}: started{on}", flush=True)
            for sentinel in connection.wait(list(running)):
                job, process, receiver = running.pop(sentinel)  # type: ignore[arg-type]
                free.append((job.gpus, job.processors))
                results[job.number] = _result(job, process, receiver)
                done, left = len(results), len(job_overrides) - len(results)
                rest = f", about {duration((time.monotonic() - began) * left / done)} left" if left else ""
                text = outcome_text(folder, job.name, results[job.number])
                print(f"== {job.name}: {text}; {done} of {len(job_overrides)} done{rest}", flush=True)
    except BaseException:
        signals.arrived()
        for _, process, _ in running.values():
            process.terminate()  # no second signal to a run of a sweep that Ctrl-C has reached already
        until = time.monotonic() + PATIENCE_S
        for _, process, _ in running.values():
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        raise
    return [results[number] for number in sorted(results)]


def _places(launcher: "Processes") -> list[tuple[Sequence[str], Sequence[int]]]:
    """Return the GPUs and processors of each job that may run at a time."""
    each, gpus = launcher.gpus_per_run, launcher.gpus
    count = min(launcher.jobs, max(1, len(gpus) // each)) if gpus and each else launcher.jobs
    allowed = sorted(os.sched_getaffinity(0)) if count > 1 and hasattr(os, "sched_getaffinity") else []
    processors = shares(allowed, count)
    return [(gpus[number * each : (number + 1) * each], processors[number]) for number in range(count)]


def outcome_text(folder: Path, name: str, result: Any = None) -> str:
    """Return the outcome of a run in a few words, by its folder, or by Hydra's result of a job that has left none."""
    run = refreshed(RunState(name, [], {}, 0), folder, lambda _: None)
    if result is not None and not run.of_its_own and (error := failure(result)):
        return f"failed ({first_line(error)})"
    before = "" if run.accuracy_before is None else f"{run.accuracy_before:.3f} -> "
    figure = "" if run.accuracy is None else f"accuracy {before}{run.accuracy:.3f}, "
    return f"{figure if run.score is None else f'score {run.score:g}, '}{run.status_text}"


def failure(result: Any) -> Exception | None:
    """Return the error of a job of Hydra's, None where it succeeded."""
    value = result._return_value  # its property prints the error and raises it
    return value if isinstance(value, Exception) else None


def _fork_server(modules: Sequence[str]) -> Any:
    """Return a context whose processes are forked from one that has loaded these modules.

    Signals to the whole process group, as a terminal sends them, do not end that process before its jobs.
    """
    place_sockets()
    context = get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _result(job: _Job, process: Any, receiver: Connection) -> Any:
    """Return Hydra's result of a job that has ended."""
    process.join()
    result, code = JobReturn(overrides=list(job.overrides)), process.exitcode
    try:
        result.status, result.return_value = receiver.recv()
    except EOFError:
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        result.status, result.return_value = JobStatus.FAILED, RuntimeError(why)
    receiver.close()
    return result


def _run_job(job: _Job, sender: Connection, shared: bytes) -> None:
    """Have Hydra run one job, in its own process. `shared`: what all jobs of the sweep need."""
    import cloudpickle

    signals.heed_signals()
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
        with suppress(OSError):  # it has ended already
            select.select([os.pidfd_open(parent)], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    if parent != os.getpid() and hasattr(os, "pidfd_open"):
        threading.Thread(target=wait_for_end, daemon=True).start()
