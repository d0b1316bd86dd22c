"""The runs of a sweep, each in a process of its own: a crash or a leak ends with its run, the others go on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rlreason.errors import ReaderGone
from rlreason.records.files import STACKS
from rlreason.records.reader import RunFolder
from rlreason.records.status import ending, read_status, write_status
from rlreason.runtime import signals
from rlreason.runtime.environment import STACKS_VARIABLE, SWEEP_VARIABLE
from rlreason.runtime.gpus import VISIBLE
from rlreason.runtime.processors import children_on
from rlreason.runtime.text import shorten
from rlreason.runtime.watchdog import silent_for
from rlreason.sweeps.forks import THREADS as OMP
from rlreason.sweeps.forks import Forks, Process
from rlreason.sweeps.table import SweepRun
from rlreason.sweeps.watched import TICK_S, Watch, early_stacks

PATIENCE_S = signals.LIMIT_S + 10  # for a run that was sent SIGTERM to clean up
AT_ONCE_S = 3.0  # for one that was sent a second signal
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Start:
    """How a run of a sweep is started.

    `sources`: flags by which it finds the same options. `place`: a folder for what a process writes before it has one.
    """

    sweep: str  # its name
    sources: Sequence[str]
    place: Path
    console: Path | None = None  # the file that its output is added to; None: this process's own streams
    processors: Sequence[int] | None = None  # that it may use; None: all that this process may
    threads: int | None = None  # for numerical work, at most; None: its own choice
    environment: Mapping[str, str | None] = field(default_factory=dict)  # changes to this process's; None: not set
    forks: Forks | None = None  # from which it is forked; None: its process loads its libraries itself
    gpus: Sequence[str] = ()  # that it alone has, and sees; none: those that this process sees

    @property
    def omp_threads(self) -> str | None:
        """OMP_NUM_THREADS of its environment; None where it is not set."""
        given = os.environ.get(OMP)
        return given if self.threads is None else str(_at_most(given, self.threads))


class Child:
    """The process of one run of a sweep.

    `overrides`: the run's, which writes into `folder`. One that shows no sign of life for `limit_s` seconds is ended
    and counts as failed. To be made in the main thread: the kernel ends a process with the *thread* that started it.
    """

    def __init__(self, start: Start, folder: Path, overrides: Sequence[str], limit_s: float | None) -> None:
        words = [*start.sources, *overrides, f"hydra.run.dir='{folder}'"]
        early = early_stacks(start.place)
        env: dict[str, str | None] = {**os.environ, SWEEP_VARIABLE: start.sweep, STACKS_VARIABLE: str(early)}
        env[OMP] = start.omp_threads
        if threading.current_thread() is threading.main_thread():
            env[signals.FOLLOWS] = str(os.getpid())
        env |= {**start.environment, **({VISIBLE: ",".join(start.gpus)} if start.gpus else {})}
        given = {name: value for name, value in env.items() if value is not None}
        with ExitStack() as stack:
            out = None
            if start.console is not None:
                start.console.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(start.console.open("ab"))
            forked = start.forks.start(words, given, out, start.processors) if start.forks else None
            self.process: Process = forked or _started(words, given, out, start.processors)
        self.folder, self.limit_s, self.console, self.gpus = folder, limit_s, start.console, start.gpus
        self._watch, self._looked = Watch(self.process, folder, limit_s, early), time.monotonic()

    def look(self) -> SweepRun | None:
        """What the run came to; None while it is under way."""
        if self.process.poll() is not None:
            return came_to(self.folder, self.process.returncode, self.console)
        if time.monotonic() - self._looked >= TICK_S:
            self._looked = time.monotonic()
            if self._watch.hangs() and self.limit_s is not None:
                self._watch.end()
                return came_to_nothing(self.folder, self.limit_s)
        return None


def _started(
    words: Sequence[str], env: Mapping[str, str], out: IO[bytes] | None, processors: Sequence[int] | None
) -> Process:
    """A process that loads its libraries itself."""
    with children_on(processors):
        argv = [sys.executable, "-m", "rlreason", *words]
        return subprocess.Popen(argv, env=env, stdout=out, stderr=out)


def stop(children: Sequence[Child]) -> list[SweepRun]:
    """Stop runs with SIGTERM, and wait until they have recorded how they ended; at a second signal stop them at once.

    Ctrl-C on a terminal has reached them already: a further SIGTERM does not count as a second signal to a run of a
    sweep, a further SIGINT does.
    """
    alive = [child.process for child in children if child.process.poll() is None]

    def at_once() -> None:
        for process in alive:
            process.send_signal(signal.SIGINT)
        _wait(alive, AT_ONCE_S)

    with signals.before_leaving(at_once):
        try:
            for process in alive:
                process.terminate()
            _wait(alive, PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the latter in a launcher's own process
            for process in alive:
                process.kill()
            for process in alive:
                process.wait()
    return [came_to(child.folder, child.process.returncode) for child in children]


def _wait(processes: Sequence[Process], seconds: float) -> None:
    """Wait for all of them; `TimeoutExpired` where that takes longer."""
    end = time.monotonic() + seconds
    for process in processes:
        process.wait(max(0.01, end - time.monotonic()))


def _at_most(given: str | None, threads: int) -> int:
    """
    >>> _at_most(None, 2), _at_most("1", 2), _at_most("16", 2), _at_most("4,2", 2)
    (2, 1, 2, 2)
    """
    return min(int(given), threads) if given and given.isdigit() and int(given) else threads


def came_to_nothing(folder: Path, limit_s: float) -> SweepRun:
    """The run in `folder`, which was ended because it hung: said here and in its folder."""
    why = f"{silent_for(limit_s)}; what its processes did then is in {folder / STACKS}"
    print(f"! {folder.name} was ended: {why}; type the sweep again, and it goes on", flush=True)
    if read_status(folder) in ("running", "interrupted"):  # it knows of a signal alone
        write_status(folder, "failed", why)
    return SweepRun(folder.name, {"status": "failed"}, f"silent for waits.run_s={limit_s:g} s")


def came_to(folder: Path, code: int, console: Path | None = None) -> SweepRun:
    """The run in `folder` whose process ended with `code` (below 0: by a signal); `console`: what it has printed."""
    summary = RunFolder(folder).summary if folder.is_dir() else None
    if summary is not None and ending(read_status(folder) or "finished").exit_code == code:
        return SweepRun(folder.name, summary)
    if code in (130, ReaderGone.exit_code, -signal.SIGINT, -signal.SIGTERM):
        return SweepRun(folder.name, {"status": "interrupted"})
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code < 0 and read_status(folder) == "running":  # it could not record that itself
        write_status(folder, "failed", reason)
    if console is not None and (last := _last_line(console)):
        reason += f": {last}"
    return SweepRun(folder.name, {"status": "failed"}, reason)


def _last_line(path: Path) -> str:
    """The last line of a file that says something, without the program's name; "" where there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        return shorten(next((line for line in reversed(lines) if line), "").removeprefix("rlreason: "), 200)
    return ""
