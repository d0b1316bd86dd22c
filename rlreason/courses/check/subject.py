"""Define the records of a check and the functions of each handout, and format values and errors as text."""

from __future__ import annotations

import inspect
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from torch import Tensor


Inputs = dict[str, Any]
Observed = dict[str, "Tensor"]  # results and gradients of one call, by name


class Kind(NamedTuple):
    """A kind of bug: what is wrong, and where to look. Neither gives the solution away."""

    name: str
    where: str


class Fault(Exception):  # noqa: N818  # it is a result, not an error of ours
    """The user's function raised, returned another type, or changed its inputs."""

    def __init__(self, kind: Kind, yours: str = "", ours: str = "") -> None:
        super().__init__(kind.name)
        self.kind, self.yours, self.ours = kind, yours, ours


class UnwrittenFault(Fault):
    """The user's function raised NotImplementedError or returned None: this case is not written yet."""


class NotWrittenError(Exception):
    """No case of the function is written yet."""


class TimeUpError(BaseException):
    """The time limit of a function has passed. Not an `Exception`, so that user code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUpError` in the block after so many seconds of the processor, or twice as many by the clock.

    So a busy machine does not make a right function look like one that hangs.
    """

    def up(number: int, frame: object) -> NoReturn:
        raise TimeUpError

    before = [signal.signal(number, up) for number in (signal.SIGALRM, signal.SIGPROF)]
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)  # again and again, for code that catches everything
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds, 0.2)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True)
class CallCase:
    """The arguments of one call, by the handout's names."""

    inputs: Inputs
    branch: str = ""  # cases of one branch share a diagnosis
    about: str = ""  # what is special about the case
    meaning: Kind | None = None  # the bug, if only such cases show a difference


@dataclass(frozen=True)
class Bug:
    """One bug, as it is reported."""

    function: str
    kind: str
    where: str
    inputs: dict[str, str] = field(default_factory=dict)
    yours: str = ""
    ours: str = ""
    note: str = ""  # where and when it shows


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A known mistake: a wrong function in the place of one step of the right computation."""

    step: str
    kind: Kind
    replacement: Callable[..., Any]

    def at(self, step: str, right: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that computes this step."""
        return self.replacement if step == self.step else right


NO_MISTAKE = Mistake("", Kind("", ""), lambda: None)


def known(step: str, where: str, *mistakes: tuple[str, Callable[..., Any]]) -> tuple[Mistake, ...]:
    """Return the mistakes of one step, which are looked for at one place, from (name, replacement)."""
    return tuple(Mistake(step, Kind(name, where), replacement) for name, replacement in mistakes)


@dataclass(frozen=True)
class Subject:
    """All cases and known mistakes of one function of a handout."""

    ours: Function
    cases: Callable[[], Sequence[CallCase]]
    returns: str | tuple[str, ...] | list[str] = ""  # one result, the items of a tuple, or the keys of a dictionary
    wrong: Callable[[Inputs, Mistake], Any] = lambda inputs, mistake: None  # its answer with this mistake
    mistakes: Sequence[Mistake] = ()
    scalar: bool = False  # it returns one number
    calls_backward: bool = False
    properties: Sequence[Callable[[Any], Iterable[Bug]]] = ()  # tried where the cases show no bug
    hint: Callable[[Subject, Function], Kind | None] = lambda subject, function: None  # where no known mistake fits
    optional: frozenset[str] = frozenset()  # branches that the handout leaves open: differences are notes
    as_well: Callable[[Inputs], Inputs | None] = lambda inputs: None  # inputs for which our answer is right as well

    @property
    def name(self) -> str:
        """Return the handout's name of the function."""
        return str(self.ours.__name__)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the handout's parameters, in order."""
        return tuple(name for name in inspect.signature(self.ours).parameters if name != "empty")  # which is ours alone

    def wrong_function(self, mistake: Mistake) -> Function:
        """Return the function with a known mistake, which takes keyword arguments."""
        return lambda **inputs: self.wrong(inputs, mistake)


@dataclass(frozen=True)
class LoopBug:
    """A bug of a loop or train step, before the function and the run that show it are added."""

    kind: Kind
    yours: str = ""
    ours: str = ""
    inputs: dict[str, str] = field(default_factory=dict)

    def bug(self, function: str, run: dict[str, str]) -> Bug:
        """Return it as a bug of this function, with what describes the run before the inputs."""
        return Bug(function, *self.kind, run | self.inputs, self.yours, self.ours)


LONGEST = 400


def short_text(value: Any) -> str:
    """Return a value as short text: a tensor as nested lists of four digits.

    >>> short_text([1.0, "a", 0.33333333])
    "[1, 'a', 0.3333]"
    """
    if hasattr(value, "detach"):
        text = _numbers(value.detach().tolist())
    elif isinstance(value, float | list | tuple | bool):
        text = _numbers(value)
    else:
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_numbers, value))}]"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if value else "0"
    return repr(value)


def inputs_as_text(inputs: dict[str, Any]) -> dict[str, str]:
    """Return every input by name as text: the `description` of an object that has one."""
    return {
        name: value.description if hasattr(value, "description") else short_text(value)
        for name, value in inputs.items()
        if value is not None
    }


def their_error(error: BaseException) -> str:
    """Return an error of the user's code as text: its type, its first line, and the line of that code that raised it.

    >>> their_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return text + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def _is_library(file: str) -> bool:
    """Return whether a file is of this package, of an installed one, or of Python itself."""
    roots = (Path(__file__).parent, *(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib")))
    return file.startswith("<") or "site-packages" in file or any(root in Path(file).parents for root in roots)


LOOP = "train_grpo"
SECONDS_TO_IMPORT = 30.0  # of the processor, for a module, which may bring torch and vllm with it
_BOTH = ("tokenize_prompt_and_output", "compute_entropy", "get_response_log_probs")
_2025 = (
    *_BOTH,
    "masked_normalize",
    "sft_microbatch_train_step",
    "compute_group_normalized_rewards",
    "compute_naive_policy_gradient_loss",
    "compute_grpo_clip_loss",
    "compute_policy_gradient_loss",
    "masked_mean",
    "grpo_microbatch_train_step",
)
COURSES = {
    "cs336_2025": _2025,
    "cs336_2026": (
        *_BOTH,
        "compute_rollout_rewards",
        "compute_group_normalized_rewards",
        "compute_policy_gradient_loss",
        "aggregate_loss_across_microbatch",
        "grpo_train_step",
    ),
    "pku_hw3": _2025,
}
CHECKED_NAMES = tuple(dict.fromkeys([*COURSES["cs336_2025"], *COURSES["cs336_2026"], LOOP]))
#: Parameters that tell the year of a function whose name both years have.
_PARAMETER_OF_YEAR = {
    "compute_group_normalized_rewards": {"reward_fn": "cs336_2025", "raw_rewards": "cs336_2026"},
    "compute_policy_gradient_loss": {"loss_type": "cs336_2025", "importance_reweighting_method": "cs336_2026"},
}


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that have a handout's name; `run_NAME` counts as NAME."""
    functions = {}
    for name in CHECKED_NAMES:
        for spelled in (name, f"run_{name}"):
            value = getattr(module, spelled, None)
            if callable(value):
                functions[name] = value
                break
    return functions


def course_of(functions: Mapping[str, Callable[..., Any]]) -> str:
    """Return the year of these functions, by names that only one year has and by parameters; 2025 by default."""
    votes = {"cs336_2025": 0, "cs336_2026": 0}
    for name, function in functions.items():
        years = [year for year in votes if name in COURSES[year]]
        if name in _PARAMETER_OF_YEAR:
            years = [year_of(name, function)]
        if len(years) == 1 and years[0]:
            votes[years[0]] += 1
    return max(votes, key=lambda year: votes[year])


def year_of(name: str, function: Callable[..., Any]) -> str:
    """Return the year of a function by its parameters; "" if they fit both."""
    if name not in _PARAMETER_OF_YEAR:
        return ""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    return next((year for parameter, year in _PARAMETER_OF_YEAR[name].items() if parameter in parameters), "")


def fits(name: str, function: Callable[..., Any], course: str) -> bool:
    """Return whether a function's parameters fit this course's year."""
    year = year_of(name, function)
    return not year or COURSES[year] == COURSES[course]
