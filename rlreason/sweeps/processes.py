"""The runs of a sweep, each in a process of its own: a crash or a leak ends with its run, the others go on."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from rlreason.errors import ConfigError, ReaderGone
from rlreason.records.files import STACKS
from rlreason.records.reader import RunFolder
from rlreason.records.status import ending, read_status, write_status
from rlreason.runtime import signals
from rlreason.runtime.environment import STACKS_VARIABLE, SWEEP_VARIABLE
from rlreason.runtime.watchdog import silent_for
from rlreason.sweeps.table import SweepRun
from rlreason.sweeps.watched import early_stacks, wait_for

SWEEP = "RLREASON_SWEEP"  # environment: a `Sweep` as JSON, for the processes that a launcher starts
PATIENCE_S = signals.LIMIT_S + 10  # for a run that was sent SIGTERM to clean up
AT_ONCE_S = 3.0  # for one that was sent a second signal


@dataclass(frozen=True, slots=True)
class Sweep:
    """What every job of a sweep needs, in whichever process a launcher runs it."""

    sources: list[str]  # flags by which a run finds the same options
    log: str  # a file, to which each job adds a line on its run

    @classmethod
    def of_environment(cls) -> "Sweep":
        """The sweep that this process belongs to; `KeyError` where there is none."""
        return cls(**json.loads(os.environ[SWEEP]))

    def announce(self) -> None:
        """Put the sweep into the environment of the processes to come."""
        os.environ[SWEEP] = json.dumps(asdict(self))

    def note(self, run: SweepRun) -> None:
        """Add a run that has ended to the log."""
        with Path(self.log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")

    def runs(self) -> list[SweepRun]:
        """The runs that have ended, in the order of their ends."""
        path = Path(self.log)
        return [SweepRun(**json.loads(line)) for line in path.open(encoding="utf-8")] if path.exists() else []

    def run(self, name: str, folder: Path, overrides: list[str], config: str, limit_s: float | None = None) -> SweepRun:
        """Run one job of the sweep called `name` in a process, and log it; a finished one is not run again.

        `config` is the job's whole config as text: a finished run of another one in `folder` is a `ConfigError`.
        One that shows no sign of life for `limit_s` seconds is ended and counts as failed. On KeyboardInterrupt the
        process is stopped and its run logged first.
        """
        if (ended := _finished_before(folder, config)) is not None:
            print(f"\n== {folder.name}: finished before, not run again", flush=True)
            self.note(ended)
            return ended
        print(f"\n== {folder.name}", flush=True)
        argv = [sys.executable, "-m", "rlreason", *self.sources, *overrides, f"hydra.run.dir='{folder}'"]
        early = early_stacks(Path(self.log).parent)
        env = os.environ | {SWEEP_VARIABLE: name, STACKS_VARIABLE: str(early)}
        if threading.current_thread() is threading.main_thread():  # the kernel watches the thread that starts it
            env[signals.FOLLOWS] = str(os.getpid())
        process = None
        try:
            with signals.held():  # else a run could start and stay unknown
                process = subprocess.Popen(argv, env=env)
            hung = wait_for(process, folder, limit_s, early)
        except KeyboardInterrupt:
            signals.arrived()
            if process is None:
                raise
            _stop(process)
            self.note(came_to(folder, process.returncode))
            raise
        ended = came_to_nothing(folder, limit_s) if hung and limit_s else came_to(folder, process.returncode)
        self.note(ended)
        return ended


def _finished_before(folder: Path, config: str) -> SweepRun | None:
    """The run in the folder, where it came to its end with this config; with another it is refused."""
    run = RunFolder(folder) if folder.is_dir() else None
    if run is None or run.summary is None:
        return None
    if run.config != config:
        raise ConfigError(f"{folder} is a finished run of another config: move it away, or set hydra.sweep.dir")
    return SweepRun(folder.name, run.summary)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a run with SIGTERM, and wait until it has recorded how it ended; at a second signal stop it at once.

    Ctrl-C on a terminal has reached the run already: a further SIGTERM does not count as a second signal to a run of
    a sweep, a further SIGINT does.
    """

    def at_once() -> None:
        process.send_signal(signal.SIGINT)
        process.wait(AT_ONCE_S)

    with signals.before_leaving(at_once):
        try:
            process.terminate()
            process.wait(PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the latter in a launcher's own process
            process.kill()
            process.wait()


def came_to_nothing(folder: Path, limit_s: float) -> SweepRun:
    """The run in `folder`, which was ended because it hung: said here and in its folder."""
    why = f"{silent_for(limit_s)}; what its processes did then is in {folder / STACKS}"
    print(f"! {folder.name} was ended: {why}; type the sweep again, and it goes on", flush=True)
    if read_status(folder) in ("running", "interrupted"):  # it knows of a signal alone
        write_status(folder, "failed", why)
    return SweepRun(folder.name, {"status": "failed"}, f"silent for waits.run_s={limit_s:g} s")


def came_to(folder: Path, code: int) -> SweepRun:
    """The run in `folder` whose process ended with `code` (below 0: by a signal)."""
    summary = RunFolder(folder).summary if folder.is_dir() else None
    if summary is not None and ending(read_status(folder) or "finished").exit_code == code:
        return SweepRun(folder.name, summary)
    if code in (130, ReaderGone.exit_code, -signal.SIGINT, -signal.SIGTERM):
        return SweepRun(folder.name, {"status": "interrupted"})
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code < 0 and read_status(folder) == "running":  # it could not record that itself
        write_status(folder, "failed", reason)
    return SweepRun(folder.name, {"status": "failed"}, reason)
