"""What a service says in a logger's thread is kept from the terminal: a run reports for itself."""

import builtins
import threading
from functools import wraps
from types import ModuleType
from typing import Any

_thread = threading.local()
_lock = threading.Lock()


def listen() -> list[tuple[str, str]]:
    """(function, text) of all that silenced functions are told in this thread from here on, instead of showing it."""
    heard: list[tuple[str, str]] = []
    _thread.heard = heard
    return heard


def silence(module: ModuleType, name: str) -> None:
    """Have a function that a module shows texts with be heard in the threads that listen, and be itself in others."""
    shows = vars(module).get(name) or vars(builtins).get(name)
    with _lock:
        if shows is None or hasattr(shows, "heard"):
            return

        @wraps(shows)
        def heard_or_shown(*words: Any, **how: Any) -> None:
            heard = getattr(_thread, "heard", None)
            if heard is None:
                shows(*words, **how)
            else:
                heard.append((name, " ".join(map(str, words[:1]))))

        vars(heard_or_shown)["heard"] = True
        vars(module)[name] = heard_or_shown
