"""Options of the group `data` whose answers are checked by a verifier."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from rlreason.config.data import MOST_BYTES, MOST_COUNTDOWNS, DataConfig
from rlreason.config.sources import locate, may_be_hub_name


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
