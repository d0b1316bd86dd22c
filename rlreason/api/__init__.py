"""Run from Python what the command line runs, in this process, and return values to work with.

Hydra is imported when a function is called, and torch when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlreason.api.runs import Run, load_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlreason.config.run import RunConfig

__all__ = ["Run", "compose", "evaluate", "load_run", "train"]


def train(
    *overrides: str,
    config: DictConfig | RunConfig | None = None,
    reward: Callable[..., Any] | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    data: Any = None,
    quiet: bool = False,
) -> Run:
    """Start the run of these overrides, and return it when it has ended.

        run = train("loss=grpo_clip", "n_steps=20", "hydra.run.dir=runs/clip")
        run = train("resume=runs/clip", "n_steps=40")  # resumes it, in its folder

    `config`: what `compose` returned, changed or not; `overrides` then come on top. `reward`, `loss`, `data`: of your
    own, as functions. `quiet`: print nothing. A run that diverged is returned too: see its `status`.

    Raises `ConfigError` where the overrides are refused, `DataError`, `EngineError` or `ResourceError` where the run
    cannot go on, and KeyboardInterrupt where it was interrupted, after its records were finished. SIGTERM ends the
    whole process, as it does without a run.
    """
    from rlreason.api.start import start

    return start([], overrides, config, {"reward": reward, "loss": loss, "data": data}, quiet)


def evaluate(
    *overrides: str | Run,
    config: DictConfig | RunConfig | None = None,
    reward: Callable[..., Any] | str | None = None,
    data: Any = None,
    quiet: bool = False,
) -> Run:
    """Measure a model as it is: `train` with `algorithm=evaluate`.

    evaluate("model=local", "model.path=DIR", "data=gsm8k", "data.path=DIR", "eval_problems=200")
    evaluate(run, "eval.samples=4")  # a run's saved model, evaluated as at the end of training
    """
    from rlreason.api.start import start

    objects = {"reward": reward, "loss": None, "data": data}
    if overrides and isinstance(overrides[0], Run):
        return start(overrides[0], overrides[1:], config, objects, quiet)
    return start(["algorithm=evaluate"], overrides, config, objects, quiet)


def compose(*overrides: str) -> DictConfig:
    """Return the settings of the run of these overrides, to be read or changed, and given to `train(config=...)`.

    Types and names are checked here, the command line's rules when the run starts. Every setting has a value here, also
    `train_batch_size`, which overrides take from `rollout_batch_size`: change both.
    """
    from rlreason.api.start import settings

    return settings(overrides)
