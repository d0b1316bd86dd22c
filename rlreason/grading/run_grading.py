"""How the responses of a run were graded: its reward, and the settings of its grader."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

from rlreason.answers.verdict import Settings
from rlreason.grading.formats import Extract
from rlreason.grading.grader import Grader
from rlreason.grading.verifiers import reward_name

#: What a run's `grading` group may hold: all that a grader takes beside the reward and what is no setting.
SETTINGS = tuple(name for name in signature(Grader).parameters if name not in ("reward", "log_path", "symbolic"))


class RunGrading(NamedTuple):
    """The reward that graded a run (a format's name, or `module:function`) and what the `Grader` was given with it."""

    reward: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, reward: str, verifier: str | None, grading: Mapping[str, Any]) -> "RunGrading":
        """From a run's settings: its prompt's reward, its data's verifier and the group `grading`."""
        return cls(reward_name(reward, verifier), {key: grading[key] for key in SETTINGS if key in grading})

    @property
    def extract(self) -> Extract:
        """Where in a response its answer is looked for."""
        extract: Extract = self.settings.get("extract", "strict")
        return extract

    @property
    def comparison(self) -> Settings:
        """How two answers are compared."""
        return Settings(**{key: self.settings[key] for key in ("percent", "rel_tol") if key in self.settings})
