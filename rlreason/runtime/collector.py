"""Python's garbage collector while libraries are loaded: it would look through their many new objects over and over.

A third of the time that torch and transformers take to load is spent so, and there is nothing to collect.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(for_good: bool = False) -> Iterator[None]:
    """A block that loads modules, without collection.

    `for_good`: what lives at its end is never looked through again, for a process that loads nothing for others. In a
    notebook, whose user may have garbage of his own by then, it must be False.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_on:
            gc.enable()
