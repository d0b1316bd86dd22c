"""A GRPO run's settings in their classes, and the samples of one of its saved steps."""

from dataclasses import replace

from omegaconf.errors import OmegaConfBaseException

from rlreason.config.grpo import GRPOConfig
from rlreason.config.store import retyped
from rlreason.errors import ConfigError, DataError
from rlreason.records.files import CONFIG, PROVENANCE
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_LEARN, sample_of
from rlreason.runtime.text import spans
from rlreason.types import Sample


def read_run(folder: RunFolder) -> GRPOConfig:
    """The settings of a GRPO run. Raises `ConfigError` for another one, and for settings of another version."""
    settings = folder.settings
    if settings.get("algorithm") != "grpo":
        of = settings.get("algorithm")
        raise ConfigError(f"RUN={folder.path} is a run of algorithm={of}: give one of algorithm=grpo")
    try:
        return retyped(settings, folder.schemas, GRPOConfig)
    except (OmegaConfBaseException, KeyError, TypeError, AssertionError) as error:  # the last three: of the schemas
        reason = next(iter(str(error).splitlines()), f"{folder.schemas}")
        raise ConfigError(
            f"RUN={folder.path}: its {CONFIG} is not of this version, or not of the schemas that its {PROVENANCE} "
            f"names ({reason}): repeat the run with this version"
        ) from error


def read_step(folder: RunFolder, run: GRPOConfig, step: int | None = None) -> tuple[int, list[Sample]]:
    """The responses of a saved training step, by default of the last one, with no advantage given yet.

    Their old log-probabilities are those of the policy that sampled, as the trainer scored it or, where it did not, as
    the engine reported it; so under the final policy the ratios differ from 1.
    """
    saved = {file.step: file for file in folder.rollouts() if file.step is not None}
    if not saved:
        raise ConfigError(
            f"RUN={folder.path} saved no rollouts (save_rollouts_every={run.save_rollouts_every}, n_steps={run.n_steps}"
            f", {folder.status}): repeat it with save_rollouts_every=1"
        )
    steps = sorted(saved)
    chosen = steps[-1] if step is None else step
    if chosen not in saved:
        raise ConfigError(f"--step {chosen} was not saved: choose one of {', '.join(spans(steps))}")
    samples = [sample_of(row) for row in folder.rows(saved[chosen], TO_LEARN).values()]
    if not samples:
        raise DataError(f"{saved[chosen].path} holds no responses: choose another --step")
    known = [s.log_probs or s.response.log_probs for s in samples]
    return chosen, [replace(s, log_probs=lp, old_log_probs=lp) for s, lp in zip(samples, known, strict=True)]
