"""The objectives that the laboratory compares, each as the run that would have had it, and their credit.

It knows settings and samples; it must not know the model or the optimizer.
"""

from collections.abc import Sequence
from dataclasses import replace

from rlreason.algorithms.grpo import with_advantages
from rlreason.config.groups import BaselineConfig, LengthNormConfig, LossConfig, StdNormConfig
from rlreason.config.grpo import GRPOConfig
from rlreason.objectives.rules import NAMED_OBJECTIVES, OPTIONS, check_objective
from rlreason.setup.learner import credit_rule
from rlreason.types import Sample

OWN = "this run"


def variants(run: GRPOConfig) -> dict[str, GRPOConfig]:
    """Name -> run: the run's own objective, every named one, and the own one with each other length norm."""
    others = [kind for kind in OPTIONS["length_norm"] if kind != run.length_norm.kind]
    moved = {f"length_norm={kind}": replace(run, length_norm=_length_norm(run, kind)) for kind in others}
    allowed = {name: other for name, other in moved.items() if not check_objective(other.settings())}
    return {OWN: run} | {name: with_objective(run, name) for name in NAMED_OBJECTIVES} | allowed


def with_objective(run: GRPOConfig, name: str) -> GRPOConfig:
    """The run as `objective=NAME` would have made it: what the objective does not set stays the run's."""
    axes = NAMED_OBJECTIVES[name]
    numbers = {key: axes[key] for key in ("cliprange_low", "cliprange_high", "dual_clip", "ratio_cap")}
    return replace(
        run,
        loss=LossConfig(axes["loss_type"], **numbers),
        length_norm=_length_norm(run, axes["length_norm"]),
        baseline=BaselineConfig(axes["baseline"]),
        std_norm=StdNormConfig(axes["std_norm"]),
        **{key: axes[key] for key in ("kl_placement", "kl_coef", "entropy_coef", "overlong", "zero_variance")},
    )


def _length_norm(run: GRPOConfig, kind: str) -> LengthNormConfig:
    return LengthNormConfig(kind, run.length_norm.constant)


def in_words(run: GRPOConfig) -> str:
    """The axes in one line, extra terms only where there are some."""
    extras = [f"kl in {run.kl_placement}"] if run.kl_placement != "none" else []
    extras += ["entropy"] if run.entropy_coef else []
    extras += [f"overlong={run.overlong}"] if run.overlong != "none" else []
    extras += ["skip"] if run.zero_variance == "skip" else []
    axes = run.loss.loss_type, run.length_norm.kind, f"{run.baseline.kind}/{run.std_norm.kind}"
    return ", ".join([*axes, *extras])


def with_credit(samples: Sequence[Sample], run: GRPOConfig) -> list[Sample]:
    """Copies of the samples with the credit that the run's rule gives; groups are formed by problem id.

    The reference log-probabilities stay on the copies only where the run has a KL term.
    """
    has_kl = run.kl_placement != "none"
    copies = [replace(s, reference_log_probs=s.reference_log_probs if has_kl else None) for s in samples]
    return with_advantages(copies, credit_rule(run), run.kl_estimator)[0]
