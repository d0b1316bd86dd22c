"""Send a command a signal at an exact place of its code: at the n-th call of a function, or at its return.

    KILL_AT=rlreason.training.learner:Learner.take_step:call:3  in the environment of a command of `starts.Started`
    KILL_BY=SIGINT                                         the signal; SIGKILL by default

The command's code is unchanged: Python calls the function here before every call, as for a debugger.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

AT, SIGNAL = "KILL_AT", "KILL_BY"


def follow(at: str | None, by: str | None) -> None:
    """Watch the calls of this process, in every thread, and send it the signal at the place."""
    if not at:
        return
    module, function, event, number = at.split(":")
    left = int(number)

    def watch(frame: FrameType, kind: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if kind == event and code.co_qualname == function and frame.f_globals.get("__name__") == module:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), getattr(signal, by or "SIGKILL"))

    threading.setprofile(watch)
    sys.setprofile(watch)
