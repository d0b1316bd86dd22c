"""Hand out the GPUs of this machine to the runs of a sweep, and run them in processes of a fork server."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.records.reader import read_status, write_status
from rlreason.runtime import signals
from rlreason.runtime.early_signals import heed_signals
from rlreason.runtime.machine import (
    GPUS_VARIABLE,
    VISIBLE,
    place_sockets,
    query_driver,
    shares,
    torch_has_gpus,
    usable_processors,
)
from rlreason.runtime.text import duration, few, first_line
from rlreason.sweeps.state import RunState, refreshed

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Processes

SETTINGS = "gpus, rollout.gpus, rollout.placement"


def machine_gpus(environ: Mapping[str, str], note: Callable[[str], object] = print) -> list[str]:
    """Return the GPUs that runs started here may use, as CUDA_VISIBLE_DEVICES would name them.

    Those of RLREASON_GPUS if it is set; else those of CUDA_VISIBLE_DEVICES, unchanged (numbers or UUIDs), or all that
    nvidia-smi lists. A Slurm job gets those that Slurm gave it. Does not load torch.

    >>> machine_gpus({"RLREASON_GPUS": "0, 2"})
    ['0', '2']
    """
    if GPUS_VARIABLE in environ:
        return _names(environ[GPUS_VARIABLE])
    visible = environ.get(VISIBLE)
    if not torch_has_gpus() or (visible is not None and not _names(visible)):
        return []
    driver = query_driver()
    if driver.failure:
        note(f"note: {driver.failure}: the runs of this sweep are given no GPUs of their own")
    numbers = [str(number) for number in range(len(driver.gpus))]
    return numbers if visible is None or not numbers else _names(visible, len(numbers))


def _names(text: str, there: int | None = None) -> list[str]:
    """Return the entries of such a list, each once; CUDA reads it up to the first that names no GPU.

    >>> _names("GPU-ab, GPU-cd"), _names("1,0,-1,2"), _names("0,7,1", 2), _names("")
    (['GPU-ab', 'GPU-cd'], ['1', '0'], ['0'], [])
    """
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not name or name.startswith("-") or (there is not None and name.isdecimal() and int(name) >= there):
            break
        names.append(name)
    return list(dict.fromkeys(names))


def gpus_needed(run: AnyRunConfig) -> int:
    """Return how many GPUs a run needs by its settings: for its ranks and for its engines.

    `gpus=auto` is one rank, outside torchrun.
    """
    if not works_on_a_model(run):
        return 0
    engines = run.rollout.gpus if run.rollout.engine == "vllm" else 1
    second = run.rollout.placement == "second_gpu"
    return run.ranks_requested + engines if second else max(run.ranks_requested, engines)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """How a sweep hands out GPUs of this machine. `names`: empty if there are none, or if a launcher hands them out.

    `per_run`: as typed, for every run; None: as many as each needs. `least` and `most`: what the runs need.
    """

    names: tuple[str, ...] = ()
    per_run: int | None = None
    least: int = 1
    most: int = 1

    @property
    def handed_out(self) -> tuple[str, ...]:
        """Return the GPUs that are given to runs in turn; none where every run sees all."""
        return () if self.per_run == 0 or self.most == 0 else self.names

    def of_run(self, needed: int) -> int:
        """Return the number of GPUs for a run that needs `needed`."""
        return needed if self.per_run is None else self.per_run

    def side_by_side(self, jobs: int | None, runs: int, without: int = 1) -> int:
        """Return how many runs fit at a time: `jobs` if typed, limited by the GPUs; without GPUs, `without`.

        >>> GpuPlan(("0", "1", "2", "3"), 2).side_by_side(None, 8), GpuPlan(("0",)).side_by_side(4, 8)
        (2, 1)
        >>> GpuPlan().side_by_side(None, 8), GpuPlan().side_by_side(4, 8), GpuPlan(("0", "1")).side_by_side(None, 1)
        (1, 4, 1)
        """
        if not self.handed_out:
            return max(1, min(jobs or without, runs))
        fit = len(self.names) // max(1, self.of_run(self.least))
        return max(1, min(jobs or fit, fit, runs))

    def line(self, jobs: int | None, runs: int) -> str:
        """Return the line about GPUs in a sweep's plan; "" if this machine has none to hand out.

        >>> GpuPlan(("0", "1", "2")).line(None, 8)
        '0, 1, 2: 1 a run, 3 runs side by side (jobs=N: N of them; gpus_per_run=0 lets every run see all of them)'
        >>> GpuPlan(("0", "1")).line(4, 8)
        '0, 1: 1 a run, 2 runs side by side: jobs=4 is more than they suffice for'
        """
        names = few(self.names, 16)
        if not self.handed_out:
            return f"{names}: every run sees all of them (gpus_per_run=0)" if self.names and self.most else ""
        each, side = self.of_run(self.least), self.side_by_side(jobs, runs)
        many = f"{each}" if self.per_run is not None or self.least == self.most else f"{each} to {self.most}"
        text = f"{names}: {many} a run, {f'{side} runs side by side' if side > 1 else 'one run at a time'}"
        if jobs is None:
            return f"{text} (jobs=N: N of them; gpus_per_run=0 lets every run see all of them)"
        return f"{text}: jobs={jobs} is more than they suffice for" if side < min(jobs, runs) else text


def gpu_plan(runs: Sequence[AnyRunConfig], names: Sequence[str], per_run: int | None, here: bool) -> GpuPlan:
    """Plan the GPUs of a sweep. `names`: the GPUs of this machine. `here`: whether its runs are here.

    `ConfigError` if a run could never start: more GPUs for each than there are, or fewer than one needs.
    """
    elsewhere = not here and not torch_has_gpus()  # other machines are assumed to be like this one
    needs = [0 if elsewhere else gpus_needed(run) for run in runs] or [1]
    plan = GpuPlan(tuple(names) if here else (), per_run, min(needs), max(needs))
    there = f"{len(names)} GPUs ({few(names, 16)})" if len(names) > 1 else "one GPU" if names else "no GPU"
    other = "have the runs on other machines (hydra/launcher=submitit_slurm)"
    if per_run and per_run < plan.most:
        raise ConfigError(
            f"gpus_per_run={per_run}: a run of this sweep asks for {plan.most} GPUs by its settings ({SETTINGS}): "
            f"raise it to {plan.most}, or leave it out"
        )
    if here and per_run and per_run > len(names):
        cure = f"set it to {len(names)} or less" if names else "leave it out"
        raise ConfigError(f"gpus_per_run={per_run}: this machine has {there} for runs: {cure}, or {other}")
    if plan.handed_out and plan.most > len(names):
        raise ConfigError(
            f"a run of this sweep asks for {plan.most} GPUs by its settings ({SETTINGS}), and this machine has "
            f"{there}: ask for fewer, or {other}"
        )
    return plan


#: Modules that every run needs. Importing them starts no thread and asks no GPU for anything.
PRELOADED = (
    "rlreason.cli.command", "rlreason.training.train", "rlreason.training.jobs", "rlreason.training.preflight",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
THREADS = "OMP_NUM_THREADS"  # libraries read it as they are loaded
PARENT = "RLREASON_SWEEP_PROCESS"  # environment: the id of the process of the sweep, with which its jobs end
CONSOLES = "console"  # in a sweep's folder: a file for what each run printed, where several run at a time
PATIENCE_S = 130.0  # for runs that were sent SIGTERM to end their step and clean up


def divide_processors(side_by_side: int) -> None:
    """Set the threads of each run that this process starts to its share of the processors."""
    if side_by_side > 1:
        threads, given = max(1, usable_processors() // side_by_side), os.environ.get(THREADS, "")
        os.environ[THREADS] = str(min(int(given), threads) if given.isdigit() and int(given) else threads)


@dataclass(frozen=True, slots=True)
class _Job:
    """What the process of a job is told: its part in the sweep, and what it has of this machine."""

    name: str
    overrides: Sequence[str]
    number: int
    console: Path | None  # where it prints; None: as its sweep
    gpus: Sequence[str]  # that it sees; none: all
    processors: Sequence[int]  # that it may use; none: all
    heeded: Sequence[int]  # signals that its sweep does not ignore


@dataclass(frozen=True, slots=True)
class _Running:
    """A job in progress."""

    job: _Job
    process: Any
    receiver: Connection
    began: float


def launch(launcher: "Processes", job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
    """Run the jobs, as many at a time as the launcher says, and return Hydra's result of each, in their order.

    A job that fails does not affect the others. On KeyboardInterrupt all are stopped in order first.
    """
    jobs = _Jobs(launcher, job_overrides, first)
    try:
        while len(jobs.results) < len(job_overrides):
            while (gpus := jobs.gpus_of_next()) is not None:
                jobs.start_next(gpus)
            connection.wait([one.process.sentinel for one in jobs.running.values()])
            jobs.collect()
    except BaseException:
        signals.arrived()
        _stop([one.process for one in jobs.running.values()])
        raise
    return [jobs.results[first + index] for index in range(len(job_overrides))]


class _Jobs:
    """The jobs of a sweep: those in progress by their place, the results of others by number; the rest waits."""

    def __init__(self, launcher: "Processes", job_overrides: Sequence[Sequence[str]], first: int) -> None:
        import cloudpickle
        from hydra.core.singleton import Singleton

        self.launcher, self.overrides, self.first, self.started = launcher, job_overrides, first, 0
        shared = (launcher.hydra_context, launcher.config, launcher.task_function, Singleton.get_state())
        self.shared, self.folder = cloudpickle.dumps(shared), Path(launcher.config.hydra.sweep.dir)
        self.needs = launcher.needs or [0] * len(job_overrides)
        self.several = launcher.jobs > 1
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.processors = shares(allowed, launcher.jobs) if allowed and self.several else [[]] * launcher.jobs
        self.context = _fork_server(PRELOADED if launcher.preload else ())
        self.running: dict[int, _Running] = {}
        self.results: dict[int, Any] = {}
        self.seconds = 0.0  # of those that have ended

    def gpus_of_next(self) -> list[str] | None:
        """Return the GPUs of the next job; None if there is none, or if it has to wait for a place or for GPUs."""
        if self.started == len(self.overrides) or len(self.running) == self.launcher.jobs:
            return None
        busy = {gpu for one in self.running.values() for gpu in one.job.gpus}
        free = [gpu for gpu in self.launcher.gpus if gpu not in busy]
        count = min(self.needs[self.started], len(self.launcher.gpus))
        return free[:count] if count <= len(free) else None

    def start_next(self, gpus: list[str]) -> None:
        """Start the next job on these GPUs."""
        overrides, number = self.overrides[self.started], self.first + self.started
        name = name_of(overrides)
        place = min(set(range(self.launcher.jobs)) - self.running.keys())
        console = self.folder / CONSOLES / f"{name}.log" if self.several else None
        heeded = [number for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        job = _Job(name, overrides, number, console, gpus, self.processors[place], heeded)
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_run_job, args=(job, sender, self.shared))
        with signals.held():  # else a job could start and stay unknown
            process.start()
            self.running[place] = _Running(job, process, receiver, time.monotonic())
            self.started += 1
        sender.close()
        on = f" on GPU {', '.join(gpus)}" if gpus else ""
        beside = f", beside {len(self.running) - 1} more" if len(self.running) > 1 else ""
        print(f"{'' if self.several else chr(10)}== {name}: started{on}{beside}", flush=True)

    def collect(self) -> None:
        """Take the results of the jobs that have ended."""
        for place in [place for place, one in self.running.items() if one.process.exitcode is not None]:
            one = self.running.pop(place)
            name, result = one.job.name, _result(one, self.folder / one.job.name)
            self.results[one.job.number] = result
            self.seconds += time.monotonic() - one.began
            done, of_all = len(self.results), len(self.overrides)
            each, left = self.seconds / done, of_all - done
            rest = f", about {duration(each * left / min(left, self.launcher.jobs))} left" if left else ""
            print(f"== {name}: {outcome_text(self.folder, name, result)}; {done} of {of_all} done{rest}", flush=True)


def name_of(overrides: Sequence[str]) -> str:
    """Return the folder of a job, where its overrides name one, else its overrides without Hydra's.

    >>> name_of(["loss=gspo", "seed=1", "hydra.sweep.subdir='seed=1'"]), name_of(["loss=gspo", "seed=1"])
    ('seed=1', 'loss=gspo,seed=1')
    """
    named = [word.partition("=")[2].strip("'") for word in overrides if word.startswith("hydra.sweep.subdir=")]
    return named[-1] if named else ",".join(word for word in overrides if not word.startswith("hydra."))


def outcome_text(folder: Path, name: str, result: Any = None) -> str:
    """Return the outcome of a run in a few words, by its folder, or by Hydra's result of a job that has left none."""
    run = refreshed(RunState(name, [], {}, 0), folder, lambda _: None)
    error = failure(result) if result is not None and not run.of_its_own else None
    return f"failed ({first_line(error)})" if error else run.outcome


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
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _stop(processes: Sequence[Any]) -> None:
    """Send SIGTERM to the jobs, and kill those that have not ended after PATIENCE_S seconds."""
    for process in processes:
        process.terminate()  # no second signal to a run of a sweep that Ctrl-C has reached already
    until = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()


def _result(one: _Running, folder: Path) -> Any:
    """Return Hydra's result of a job that has ended; its folder records the end of one that was killed."""
    from hydra.core.utils import JobReturn, JobStatus

    one.process.join()
    result, code = JobReturn(overrides=list(one.job.overrides)), one.process.exitcode
    try:
        result.status, value = one.receiver.recv()
    except EOFError:
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        result.status, value = JobStatus.FAILED, RuntimeError(why)
        if code < 0 and read_status(folder) == "running":
            write_status(folder, "failed", why)
    result.return_value = value
    one.receiver.close()
    return result


def _run_job(job: _Job, sender: Connection, shared: bytes) -> None:
    """Have Hydra run one job, in its own process. `shared`: what all jobs of the sweep need."""
    import cloudpickle
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from hydra.core.utils import run_job, setup_globals
    from omegaconf import open_dict

    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_DFL if number in job.heeded else signal.SIG_IGN)
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
    before = {number: os.dup(number) for number in (1, 2)}
    with path.open("ab") as file:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(before[number], number)
            os.close(before[number])


def end_with_sweep() -> None:
    """Send this job SIGTERM when the process of its sweep on this machine has ended in whatever way. Linux only."""
    parent = int(os.environ.get(PARENT) or os.getpid())

    def wait_for_end() -> None:
        with suppress(OSError):  # it has ended already
            select.select([os.pidfd_open(parent)], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    if parent != os.getpid() and hasattr(os, "pidfd_open"):
        threading.Thread(target=wait_for_end, daemon=True).start()
