"""Which protections a system allows against a program, and in plain words what is not held back without them."""

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from rlreason.discovery.sandbox.contained import Limits, remove_leftovers, run_contained

PR_SET_DUMPABLE = 4


@cache
def protections(limits: Limits) -> dict[str, str]:
    """Those that are active here, by name, from one trial. Empty where a program could not be started at all.

    Where a program shares this process's view of processes, from now on nobody but root reads this process's memory and
    environment, which may hold keys.
    """
    remove_leftovers()
    outcome = run_contained(["-c", "pass"], b"", limits, 20.0)
    if "processes" not in outcome.protections.get("namespaces", ""):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return outcome.protections


def missing(active: Mapping[str, str]) -> list[str]:
    """What a program could do here that a better system would not allow, one clause each.

    >>> missing({"namespaces": "files, processes, network", "files": "read-only", "Landlock": "version 7"})
    []
    >>> missing({"namespaces": "", "Landlock": "version 5"})
    ['see and signal other processes of its user', 'use the network but for TCP']
    """
    spaces, version = active.get("namespaces", ""), int(active.get("Landlock", "version 0").split()[1])
    found = []
    if not version:
        found.append("read every file that its user may read")
        if "read-only" not in active.get("files", ""):
            found.append("write every file that its user may write")
    if "processes" not in spaces:
        whom = "see" if version >= 6 else "see and signal"
        found.append(f"{whom} other processes of its user")
    if "network" not in spaces and "seccomp" not in active:
        found.append("use the network" + (" but for TCP" if version >= 4 else ""))
    return found


def in_words(active: Mapping[str, str], briefly: bool = False) -> str:
    """For a person: what is active, by name alone where `briefly`; and what is not held back."""
    has = "; ".join(name if briefly else f"{name} ({what})" for name, what in active.items()) or "none"
    lacks = missing(active)
    return has + (f". Not held back on this system: it could {', and '.join(lacks)}" if lacks else "")
