"""End every process below this one, including those started meanwhile. A part of the script `warden.py`."""

import os
import signal
import time

ENDING_S = 5.0


def descendants(pid: int, most: int = 100_000) -> list[int]:
    """Return every process below one, anywhere in the tree; about `most` of them if there are more."""
    found: list[int] = []
    unread = [pid]
    while unread and len(found) <= most:
        parent = unread.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    children = list(map(int, file.read().split()))
                found += children
                unread += children
        except OSError:
            pass
    return found


def groups_of(pids: list[int]) -> set[int]:
    """Return the process groups of processes, without this one's."""
    found = {attempt(os.getpgid, pid) for pid in pids}
    return found - {None, os.getpgid(0)}


def attempt(call, *values):  # type: ignore[no-untyped-def]
    """Return the result of a system call; None if it is refused, as for a process that has ended."""
    try:
        return call(*values)
    except OSError:
        return None


def end_all() -> bool:
    """Kill every process below this one, including those started meanwhile; return False if some survive."""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        left = descendants(os.getpid())
        for group in groups_of(left):  # at once, whatever they start meanwhile
            attempt(os.killpg, group, signal.SIGKILL)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # what stands still starts no more
            for pid in left:
                attempt(os.kill, pid, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.002)
    return False
