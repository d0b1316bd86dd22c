"""Run a command, and end all that it started: once it ends, or is too many processes, or the process above does.

`python -I -S warden.py PARENT MOST COMMAND...`: the id of the process that waits, and how many processes the command
may be. Its exit code is the command's, or 128 and the number of the signal that ended it.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING_S = 5.0
LOOK_EVERY_S = 0.02
TOO_MANY = signal.SIGUSR1  # ends this process after a command that was too many processes


def main() -> None:
    """Run the command of the arguments until it ends or SIGTERM arrives, then end everything below this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it ended before this process was to learn of it
        os._exit(1)
    most, command = int(sys.argv[2]), sys.argv[3:]
    reset = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    child = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigmask=[], setsigdef=reset)
    code, too_many = None, False
    while code is None and not too_many:
        arrived = signal.sigtimedwait(awaited, LOOK_EVERY_S)
        if arrived and arrived.si_signo == signal.SIGTERM:
            break
        while code is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == child else None
        # Looked at here: what waits above looks at more, and a fork bomb leaves it no time.
        too_many = len(descendants(os.getpid(), most)) > most
    end_all()
    if too_many:
        os.kill(os.getpid(), TOO_MANY)
    os._exit(1 if code is None else code if code >= 0 else 128 - code)


def descendants(pid: int, most: int = 100_000) -> list[int]:
    """Return every process below one, parents first; about `most` of them if there are more."""
    processes, unread = list[int](), [pid]
    while unread and len(processes) <= most:
        parent = unread.pop(0)
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    children = list(map(int, file.read().split()))
                processes += children
                unread += children
    return processes


def end_all() -> None:
    """Kill every process below this one, including those started meanwhile; for a few seconds at most.

    The first come first: with the first process of a namespace, the kernel ends all others.
    """
    until, most = time.monotonic() + ENDING_S, 4
    while time.monotonic() < until:
        left = descendants(os.getpid(), most)
        for pid in left:
            with suppress(OSError):
                if (group := os.getpgid(pid)) != os.getpgid(0):
                    os.killpg(group, signal.SIGKILL)
        signal_all(left, signal.SIGSTOP)
        signal_all(left, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)
        most = 100_000


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
