"""Rewards, data and losses of the user's own: `module:function`, a name that a package announced, a Python object.

Whichever way one is given, a run knows it by a text of the form `module:function`, and `load` finds it by that text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rlreason.errors import ConfigError
from rlreason.plugins.objects import known_as

Data = str | Callable[..., Any] | Iterable[Any]  # a name, a function that makes rows, or the rows


@contextmanager
def as_settings(
    *, reward: str | Callable[..., Any] | None = None, loss: Any = None, data: Data | None = None
) -> Iterator[list[str]]:
    """The words of a command line that name these inside the block, such as `prompt.reward=module:function`.

    A function that can be imported is named by its place, so that a command line can repeat the run. Any other object
    has a name of its own here, which nobody knows after the block. Raises `ConfigError` for what cannot be used.
    """
    given = {"prompt.reward": reward, "loss": loss, "data": data if data is None else _function(data)}
    with ExitStack() as block:
        words = []
        for key, value in given.items():
            if value is None:
                continue
            if not isinstance(value, str) and not callable(value):
                raise ConfigError(f"{key.rpartition('.')[2]}={value!r:.60} is no function: give one, or its name")
            words.append(f"{key}={value if isinstance(value, str) else block.enter_context(known_as(value))}")
        yield words


def _function(data: Data) -> str | Callable[..., Any]:
    """Rows as a function that returns them."""
    if isinstance(data, str) or callable(data):
        return data
    if not isinstance(data, Iterable):
        raise ConfigError(f"data={data!r:.60} is neither rows nor a function: give a list of dictionaries")
    rows = data if isinstance(data, Mapping) or hasattr(data, "iterrows") else list(data)

    def rows_given() -> Any:
        """Rows that were given as a Python object. The run has their hash, `data_hash`, and no source of them."""
        return rows

    return rows_given
