"""What every run has, whether it works on a model here or asks one elsewhere: the base of all settings of runs."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar

from omegaconf import MISSING

from rlreason.config.groups import WaitsConfig


@dataclass
class AnyRunConfig:
    """Keys of every run."""

    trains: ClassVar[bool] = False
    works_on_a_model: ClassVar[bool] = False  # whether it loads one here; else it asks one elsewhere

    algorithm: str = MISSING  # what the run does
    seed: int = 0  # of sampling, order of problems, data.limit, new adapters; not of made-up data and the tiny model
    waits: WaitsConfig = field(default_factory=WaitsConfig)

    @property
    def most_spent(self) -> str:
        """What a run may spend at most, as it is typed; "" where it spends nothing but its time."""
        return ""

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can ask at most, where the settings say it before any data is read."""
        return None

    @property
    def ratio_is_one(self) -> bool:
        """Whether each update of the run is made by the policy that sampled what it learns from."""
        return False

    def bounds(self) -> dict[str, int | None]:
        """The settings that bound how many problems evaluations ask, with their values."""
        return {}

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each: setting, value, rule, cure."""
        groups = (getattr(self, f.name) for f in fields(self) if f.name != "eval")
        return [
            line for group in groups if is_dataclass(group) and hasattr(group, "problems") for line in group.problems()
        ]
