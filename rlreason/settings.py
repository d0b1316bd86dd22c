"""Define settings as dataclass fields that say everything: default, range or choices, what for, when they are read.

    alpha: float = number(32.0, "the output is scaled by alpha / rank", above=0, only_if="here.rank > 0")
    attention: str = choice("auto | sdpa | varlen", "attention kernel")

What `config/rules.py` checks and docs/settings.md shows is read from these fields. `only_if` is a condition on the run:
an expression of its attributes and of `here`, the group that holds the field. Of parts joined by `and` a complaint
names the first that fails. `cure` ends the complaint about a value; a number's default cure is to try its default.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple

MISSING: Any = "???"  # as omegaconf marks what must be given
PROCESSORS = os.cpu_count() or 1
MOST_SIDE_BY_SIDE = max(64, PROCESSORS)  # threads, or processes: a run may be repeated on a machine with fewer
MAX_SEED = 2**63 - 1  # numpy's seeds are at least 0, torch's have at most 64 bits
MOST = 10**9  # steps, updates, tokens: more than any run makes, and within every counter
MADE = 10**6  # generated problems, and responses in one step: these are held in memory
LARGE = 1e6  # a coefficient that float32 can still multiply by


class Settings:
    """A class of settings."""

    def rules(self) -> Iterator[str]:
        """Yield a sentence for each broken rule between these settings: setting, value, rule, cure."""
        yield from ()

    def problems(self) -> list[str]:
        """Return every broken rule of these settings, of their base classes and groups; those of groups come first."""
        groups = [getattr(self, one.name) for one in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        bad = [line for group in groups if isinstance(group, Settings) for line in group.problems()]
        for kind in reversed(type(self).__mro__):
            if issubclass(kind, Settings) and "rules" in vars(kind):
                bad += kind.rules(self)
        return bad


class Range(NamedTuple):
    """The range of a setting: `low` to `high`, both included unless `above` or `below` excludes them.

    `cure` ends the message about a number outside, after a colon.
    """

    low: float
    high: float
    cure: str = ""
    above: bool = False  # low itself is not allowed
    below: bool = False  # high itself is not allowed

    def broken_by(self, number: float) -> str:
        """Return the rule that the number breaks, as text; empty where it is in the range.

        >>> Range(0, 1, above=True).broken_by(0), Range(1, 9).broken_by(3), Range(1, 9).broken_by(10)
        ('must be above 0', '', 'must be at most 9')
        """
        if isinstance(number, float) and not math.isfinite(number):
            return "must be finite"
        if number < self.low or (self.above and number == self.low):
            if self.above:
                return f"must be above {self.low:g}"
            return "must not be negative" if self.low == 0 else f"must be at least {self.low:g}"
        if number > self.high or (self.below and number == self.high):
            high = self.high if isinstance(self.high, int) else f"{self.high:g}"
            return f"must be {'below' if self.below else 'at most'} {high}"
        return ""


def number(
    default: Any = MISSING,
    doc: str = "",
    *,
    low: float = 0,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    cure: str = "",
    only_if: str = "",
) -> Any:
    """Define a number, or a list of them, from `low` to `high`; or `above` the one, or `below` the other.

    The upper bound is by default `LARGE` if the default value is a float, else `MOST`.

    >>> number(0.5, above=0).metadata["range"]
    Range(low=0, high=1000000.0, cure='', above=True, below=False)
    """
    most = LARGE if isinstance(default, float) else MOST
    highest = next(bound for bound in (below, high, most) if bound is not None)
    bounds = Range(low if above is None else above, highest, cure, above is not None, below is not None)
    return within(bounds, default, doc=doc, only_if=only_if)


def count(default: Any = MISSING, doc: str = "", most: float = MOST, *, cure: str = "", only_if: str = "") -> Any:
    """Define a whole number from 1 to `most`, or a list of them."""
    return number(default, doc, low=1, high=most, cure=cure, only_if=only_if)


def within(limits: Range, default: Any, *, doc: str = "", only_if: str = "") -> Any:
    """Define a number within given limits."""
    return _field(default, range=limits, doc=doc, only_if=only_if)


def share(default: Any = MISSING, doc: str = "", *, only_if: str = "") -> Any:
    """Define a number from 0 to 1."""
    return number(default, doc, high=1, cure="it is a share", only_if=only_if)


def processors(default: Any, doc: str) -> Any:
    """Define a number of threads or processes that run at the same time."""
    cure = f"this machine has {PROCESSORS} processors" + ", and null leaves the number to rlreason" * (default is None)
    return number(default, doc, low=1, high=MOST_SIDE_BY_SIDE, cure=cure)


def choice(words: str, doc: str, default: Any = ..., *, cure: str = "choose one", only_if: str = "") -> Any:
    """Define a choice of words, given as "off | warn | stop"; the first one is the default."""
    choices = tuple(words.split(" | "))
    return _field(choices[0] if default is ... else default, choices=choices, cure=cure, doc=doc, only_if=only_if)


def text(default: Any = MISSING, doc: str = "", *, only_if: str = "", takes: str = "") -> Any:
    """Define any other setting: a text, a list of texts, a switch. `takes` is its type in words, where it has none."""
    return _field(default, takes=takes, doc=doc, only_if=only_if)


def group(kind: type, doc: str = "", *, only_if: str = "") -> Any:
    """Define a group of settings below one key; `only_if` holds for all of them."""
    return field(default_factory=kind, metadata={"doc": doc, "only_if": only_if})


def _field(default: Any, **metadata: Any) -> Any:
    given = {name: value for name, value in metadata.items() if value}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=given)
    return field(default=default, metadata=given)
