"""The records of a check: a kind of bug, a case that is tried, what is checked of one function, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the verb renders findings without torch
    from torch import Tensor

Inputs = dict[str, Any]
Seen = dict[str, "Tensor"]  # what is observed of a call, by name: values, shapes and gradients
Knobs = Mapping[str, str]  # knob -> how it is set


class Kind(NamedTuple):
    """A kind of bug: what is wrong in a sentence without a stop, and where to look. Neither is the solution."""

    name: str
    where: str


class Fault(Exception):  # noqa: N818  # it is a result: what the user's function did instead of answering
    """The function gave nothing that can be compared: it raised, or returned another type, or changed its inputs."""

    def __init__(self, kind: Kind, yours: str = "", ours: str = "") -> None:
        super().__init__(kind.name)
        self.kind, self.yours, self.ours = kind, yours, ours


class UnwrittenFault(Fault):
    """This call raised NotImplementedError, or gave back None: nobody has written this case yet."""


class NotWrittenError(Exception):
    """No case of the function is written yet."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call, by the handout's names. `branch`: cases of one branch share a diagnosis."""

    inputs: Inputs
    branch: str = ""
    about: str = ""  # what is special about it, in words


@dataclass(frozen=True)
class Finding:
    """One bug, as it is shown."""

    function: str
    kind: str
    where: str
    inputs: dict[str, str] = field(default_factory=dict)
    yours: str = ""
    ours: str = ""
    note: str = ""  # what else is known of it

    def as_dict(self) -> dict[str, Any]:
        """For the channel and for JSON."""
        return asdict(self)


def _no_smaller(inputs: Inputs) -> Iterator[Inputs]:
    return iter(())


Function = Callable[..., Any]
Property = Callable[[Any], Iterable[Finding]]


@dataclass(frozen=True)
class Subject:
    """All that is tried of one function of a handout."""

    name: str
    course: str  # the handout whose signature it has; several with a space between
    parameters: tuple[str, ...]  # the handout's, in order
    ours: Function
    cases: Callable[[], Sequence[Case]]
    observe: Callable[[Function, Inputs], Seen]
    wrong: Callable[[Knobs], Function] | None = None  # the function with these mistakes in it
    knobs: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict)
    smaller: Callable[[Inputs], Iterator[Inputs]] = _no_smaller
    properties: Sequence[Property] = ()  # tried always
    hints: Sequence[Callable[[Function], Kind | None]] = ()  # tried where no known mistake fits
    optional: frozenset[str] = frozenset()  # branches that a handout leaves open: not checked where they raise
    alike: Callable[[Seen, Inputs], bool] = lambda seen, inputs: False  # other answers that are right
