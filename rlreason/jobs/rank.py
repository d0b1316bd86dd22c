"""What a process does that is any rank but the first: meet the others, get the model, and do what rank 0 says.

It has no run folder, no console and no signals of its own: a signal that ends the run is heeded by rank 0.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rlreason.distributed.place import Place
from rlreason.runtime.gpus import divide_memory_finely
from rlreason.runtime.signals import FOLLOWS, killed_with_parent
from rlreason.runtime.stacks import listen
from rlreason.runtime.text import first_line

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(place: Place) -> int:
    """Follow rank 0 to the end of its run; returns the exit code."""
    killed_with_parent()  # it has nothing to tidy up
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    listen()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rlreason.cli.entry import find_modules_here
    from rlreason.distributed.start import limit_told, own_gpu_only, store_of

    find_modules_here()
    divide_memory_finely()
    own_gpu_only(place)
    store = store_of(place)
    limit_s = limit_told(store)
    return 0 if limit_s is None else _follow(place, store, limit_s)


def _follow(place: Place, store: object, limit_s: float) -> int:
    """The run's work; an error is left for rank 0 to say."""
    from rlreason.distributed.ranks import Ranks, is_gone
    from rlreason.model.devices import pick_device
    from rlreason.setup.ranks import follow

    ranks = Ranks(store, place.rank, place.world, pick_device(), limit_s)
    try:
        orders = follow(ranks)
        while (order := ranks.order())[0] != "end":
            name, arguments = order
            orders[name](*arguments)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_gone(error):  # rank 0 ended, and says why
            print(f"rank {place.rank}: rank 0 has gone", file=sys.stderr)
            return 1
        ranks.tell(f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


@contextmanager
def leading() -> Iterator[None]:
    """Around what rank 0 does: where it has begun no run that trains, the others are told so, and end.

    It ends in order, as by SIGTERM, when torchrun does.
    """
    os.environ[FOLLOWS] = str(os.getppid())
    try:
        yield
    finally:
        from rlreason.distributed.start import nothing_begins

        nothing_begins()
