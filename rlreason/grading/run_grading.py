"""How the responses of a run were graded: its reward, and the settings of its grader."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.grading.grader import Grader
from rlreason.grading.verifiers import reward_name
from rlreason.plugins.objects import GIVEN

SETTINGS = tuple(field.name for field in fields(GradingConfig))


class RunGrading(NamedTuple):
    """The reward that graded a run (a format's name, or `module:function`) and what the `Grader` was given with it."""

    reward: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, reward: str, verifier: str | None, grading: Mapping[str, Any]) -> "RunGrading":
        """From a run's settings: its prompt's reward, its data's verifier and the group `grading`."""
        return cls(reward_name(reward, verifier), {key: grading[key] for key in SETTINGS if key in grading})

    def grader(self, symbolic: bool = True) -> Grader:
        """A grader with the run's settings. Raises `ConfigError` for settings that no grader can have."""
        try:
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GradingConfig), self.settings))
        except OmegaConfBaseException as error:
            key, reason = getattr(error, "full_key", ""), str(error).splitlines()[0]
            raise ConfigError(f"grading.{key} in the config of the run cannot be used ({reason}): mend it") from None
        assert isinstance(config, GradingConfig)
        return Grader(config, self.reward, symbolic=symbolic)

    def lacking(self, grader: Grader) -> str:
        """Why this process cannot have the function that graded the run, and what to do; empty where it can."""
        why = grader.wait()
        if not why or not self.reward.startswith(f"{GIVEN}:"):
            return why
        return (
            "it was a Python object of the program that started the run, so only Python can grade with it again: give "
            "Grader(reward=FUNCTION).grade_batch(...) what load_run(RUN).responses holds"
        )
