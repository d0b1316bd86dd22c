"""Options of the group `data` that are tasks: with a verifier of their answers, or made by a function of one's own."""

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from rlreason.config.data import MOST_BYTES, MOST_COUNTDOWNS, DataConfig, RowsDataConfig
from rlreason.config.sources import locate, may_be_hub_name, unread_format
from rlreason.errors import ConfigError
from rlreason.plugins.load import NotImportableError, load


@dataclass
class CheckedDataConfig(DataConfig):
    """`verifier` names a module of `rlreason.grading.verifiers`, with one function per prompt format."""

    n_train: int = 8192  # training problems
    n_validation: int = 1024  # validation problems


@dataclass
class CountdownConfig(CheckedDataConfig):
    """Reach a target by arithmetic on the given numbers, each used once."""

    bounded: ClassVar[tuple[str, ...]] = ("pass_rate", "count")

    verifier: str | None = "rlreason.grading.verifiers.countdown"
    path: str | None = None  # a JSON-lines file or a hub name with nums and target; null: made up
    seed: int = 0  # of the problems that are made up
    min_count: int = 3  # numbers given at least
    max_count: int = 4  # numbers given at most
    max_value: int = 99  # of a given number
    max_target: int = 100  # of the number to reach

    @property
    def on_hub(self) -> bool:
        return self.path is not None and not locate(None, self.path) and may_be_hub_name(self.path)

    @property
    def quickly_read(self) -> bool:
        if self.path is None:
            return self.n_train + self.n_validation <= MOST_COUNTDOWNS
        file = locate(None, self.path)
        return file is not None and file.stat().st_size <= MOST_BYTES

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.path is not None and (other := unread_format(None, self.path)):
            bad.append(f"data.path={self.path}: {other}")
        return bad


@dataclass
class GymConfig(CheckedDataConfig):
    """Tasks of the reasoning-gym package."""

    verifier: str | None = "rlreason.grading.verifiers.gym"
    task: Any = MISSING  # a task's name, or several: [leg_counting,chain_sum]
    seed: int = 0  # of the problems that are made up

    @property
    def tasks(self) -> list[str]:
        """The tasks by name, one or several."""
        return [self.task] if isinstance(self.task, str) else self.task

    def problems(self) -> list[str]:
        bad = super().problems()
        names = self.tasks
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            bad.append(f"data.task={self.task} must be a task's name or a list of names (data.task=[leg_counting,gcd])")
        elif len(set(names)) < len(names):
            bad.append(f"data.task={names} names a task twice: name it once")
        return bad


@dataclass
class FunctionDataConfig(RowsDataConfig):
    """Problems that a function of the user's own returns, `data=module:function`: rows, or rows by split."""

    function: str = MISSING  # module:function
    options: dict[str, Any] = field(default_factory=dict)  # its parameters by name
    n_validation: int | None = None  # rows held out for validation; null: a tenth, at most 200

    @property
    def holds_out(self) -> bool:
        return True

    def problems(self) -> list[str]:
        try:
            function = load(self.function)
        except NotImportableError as error:
            return [*super().problems(), f"data.function={self.function}: {error}"]
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of some functions written in C nothing is known
            return super().problems()
        try:
            signature.bind(**self.options)
        except TypeError as error:
            line = f"data.options={self.options}: {self.function}{signature} does not take them ({error}): fix them"
            return [*super().problems(), line]
        return super().problems()


def of_function(name: str) -> FunctionDataConfig:
    """The settings of a task `module:function`: what its parameters are where nothing is typed.

    A default that is no number, text or list of these is no setting and stays the function's own.
    """
    try:
        parameters = list(inspect.signature(load(name)).parameters.values())
    except NotImportableError as error:
        raise ConfigError(f"data={name}: {error}") from None
    except (TypeError, ValueError):
        parameters = []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = {p.name: MISSING if p.default is p.empty else p.default for p in named}
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str | list | None)}
    return FunctionDataConfig(name=name, function=name, options=plain)
