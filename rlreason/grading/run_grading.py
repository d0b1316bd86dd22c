"""How the responses of a run were graded, from its folder: the one place that reads a run's reward and settings."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.grading.grader import Grader
from rlreason.grading.verifiers import reward_name

SETTINGS = tuple(field.name for field in fields(GradingConfig))


class RunGrading(NamedTuple):
    """The reward that graded a run (a format's name, or `module:function`) and what the `Grader` was given with it."""

    reward: str
    settings: dict[str, Any]

    def grader(self, symbolic: bool = True) -> Grader:
        """A grader with the run's settings. Raises `ConfigError` for settings that no grader can have."""
        return Grader(GradingConfig(**self.settings), self.reward, symbolic=symbolic)


def read_grading(run: Path, evaluates: bool = False) -> RunGrading:
    """The grading of the run in this folder, or of what its evaluations count by.

    Raises `ConfigError` where the folder is none of a run.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder: give the folder of a run, as printed at its start")
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run} has no config.yaml: give the folder of one run, not of several")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        own = (config.get("eval") or {}) if evaluates else {}  # null, in all of them: as in training
        reward = str(own.get("reward") or (own.get("prompt") or config["prompt"])["reward"])
        verifier = (own.get("data") or config.get("data") or {}).get("verifier")
        grading = config.get("grading") or {}
        settings = {key: grading[key] for key in SETTINGS if key in grading}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not name the run's reward, prompt.reward ({type(error).__name__}): give the folder of one run"
        ) from None
    return RunGrading(reward_name(reward, verifier), settings)
