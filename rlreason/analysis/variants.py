"""The objectives that the laboratory compares, each as the run that would have had it, and their advantages."""

from collections.abc import Sequence
from dataclasses import replace

from rlreason.algorithms import grpo
from rlreason.config.grpo import GRPOConfig
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.objective import Objective
from rlreason.objectives.published import NAMED, OF_LOSSES, with_axes_of
from rlreason.objectives.rules import check_objective
from rlreason.types import Sample

OWN = "this run"


def variants(run: GRPOConfig) -> dict[str, GRPOConfig]:
    """Name -> run: the run's own objective, every named one, those that a loss brings, other length norms of the own.

    What a published objective does not set (eps, the constant, the estimator of KL) stays the run's.
    """
    named = NAMED | {f"loss={name}": objective for name, objective in OF_LOSSES.items()}
    others = [kind for kind in AGGREGATIONS if kind != run.length_norm.kind]
    norms = {f"length_norm={kind}": replace(run, length_norm=replace(run.length_norm, kind=kind)) for kind in others}
    allowed = {name: other for name, other in norms.items() if not check_objective(other)}
    return {OWN: run} | {name: with_axes_of(run, other) for name, other in named.items()} | allowed


def describe(o: Objective) -> str:
    """The axes in one line, extra terms only where there are some."""
    extras = [f"kl in {o.kl_placement}"] if o.kl_placement != "none" else []
    extras += ["entropy"] if o.entropy_coef else []
    extras += [f"overlong={o.overlong}"] if o.overlong != "none" else []
    extras += ["skip"] if o.zero_variance == "skip" else []
    return ", ".join([o.loss.loss_type, o.length_norm.kind, f"{o.baseline}/{o.std_norm}", *extras])


def with_advantages(samples: Sequence[Sample], objective: Objective) -> list[Sample]:
    """Copies of the samples with the advantages that the objective gives; groups are formed by problem id.

    The reference log-probabilities stay on the copies only where the objective has a KL term.
    """
    has_kl = objective.kl_placement != "none"
    copies = [replace(s, reference_log_probs=s.reference_log_probs if has_kl else None) for s in samples]
    return grpo.with_advantages(copies, objective)[0]
