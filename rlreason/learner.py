"""One optimizer step: samples with advantages -> loss over micro-batches -> clipped gradient -> new weights.

The divisors of the loss are those of the whole step, so how the step is cut into micro-batches changes
memory and nothing else.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlreason.config.optimization import OptimizationConfig
from rlreason.model.packing import PackedBatch, pack, within_budget
from rlreason.model.policy import Policy
from rlreason.objectives.aggregation import aggregate_loss, step_divisors
from rlreason.objectives.entropy import entropy_bonus
from rlreason.objectives.kl import kl_per_token
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.mismatch import mismatch_weights
from rlreason.objectives.objective import Objective
from rlreason.optimization import make_optimizer
from rlreason.runtime.signals import held
from rlreason.statistics import gap_metrics
from rlreason.types import Sample


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one optimizer step would follow, before clipping. Samples that carry no loss have token gradients 0."""

    loss: float
    parameters: list[Tensor]  # d loss / d parameter, in the order of `Learner.parameters`
    tokens: list[Tensor]  # d loss / d log pi of each response token (length,), sample by sample, on the CPU
    clipped: float  # how many response tokens the loss clipped or capped


COUNTS = ("train/skipped_updates", "train/empty_updates", "train/tokens")


class Learner:
    """Holds the optimizer; `update` is one step of it, `gradient` what that step would follow."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optimization: OptimizationConfig,
        *,
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        can_restart: bool = False,
    ) -> None:
        """`temperature`: of the distribution that is learned; `micro_batch_tokens`: in one forward pass, at most."""
        self.policy, self.objective = policy, objective
        self.temperature, self.max_grad_norm = temperature, optimization.max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.micro_batch_size = optimization.sequences_per_micro_batch()
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(optimization, self.parameters)
        self._start = [p.detach().clone() for p in self.parameters] if can_restart else None

    def update(
        self,
        samples: Sequence[Sample],
        learning_rate: float | None = None,
        gap_from: int | None = 0,
        counted: Callable[[dict[str, float]], None] = lambda metrics: None,
    ) -> dict[str, float]:
        """One optimizer step on `samples`; returns its metrics, averaged over all its response tokens.

        Samples without `old_log_probs` are taken to be on-policy: their old log-probabilities are today's. The
        gap between the engine's log-probabilities and ours is measured from token `gap_from` on (before it, the
        engine sampled under a ban on ending), or not at all. `counted` is called with the metrics as soon as the
        weights have moved: a signal that ends the run comes before both or after both.
        """
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        gathered = self._backward(samples, gap_from)
        with held():
            metrics = self._step(*gathered)
            counted(metrics)
        return metrics

    def restart(self) -> None:
        """Back to the weights that the learner was made with, and an optimizer that has seen nothing."""
        if self._start is None:
            raise ValueError("this learner kept no copy of its first weights: make it with can_restart=True")
        with held(), torch.no_grad():
            for parameter, first in zip(self.parameters, self._start, strict=True):
                parameter.copy_(first)
        self.optimizer.state.clear()

    def gradient(self, samples: Sequence[Sample]) -> Gradient:
        """The gradient of `update`'s loss without the step: weights, optimizer and metrics stay as they are."""
        tokens = [torch.zeros(len(s.response.token_ids)) for s in samples]
        sums, *_ = self._backward(samples, token_gradients=tokens)
        parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return Gradient(sums["loss"], parameters, tokens, sums["clip_fraction"])

    def _backward(
        self, samples: Sequence[Sample], gap_from: int | None = None, token_gradients: list[Tensor] | None = None
    ) -> tuple[dict[str, float], list[Tensor], int, int]:
        """Add the step's gradient to the parameters: (sums over tokens, gaps, response tokens, micro-batches)."""
        lengths = torch.tensor([len(s.response.token_ids) for s in samples])
        kept = torch.tensor([s.kept for s in samples])
        n_sequences, n_tokens = step_divisors(lengths, kept, self.objective.length_norm.kind)
        sums: dict[str, float] = defaultdict(float)
        gaps: list[Tensor] = []
        n_micro = 0
        for with_gradient, members in zip((True, False), self._by_need(samples), strict=True):
            for rows in self.micro_batches([samples[i] for i in members]):
                chosen, n_micro = [samples[members[i]] for i in rows], n_micro + 1
                batch = pack([(s.response.prompt_ids, s.response.token_ids) for s in chosen], self.policy.device)
                with torch.set_grad_enabled(with_gradient):
                    flat, flat_entropy = self.policy.log_probs(batch, self.temperature)
                    loss, per_token = self._loss(chosen, batch, flat, flat_entropy, n_sequences, n_tokens)
                if with_gradient:
                    flat.retain_grad()
                    loss.backward()
                if token_gradients is not None and flat.grad is not None:
                    for i, part in zip(rows, flat.grad.cpu().split(batch.lengths.tolist()), strict=True):
                        token_gradients[members[i]] = part
                sums["loss"] += loss.item()
                note_entropy(chosen, per_token["entropy"])
                for name, values in per_token.items():
                    sums[name] += values[batch.response_mask].sum().item()
                if gap_from is not None and chosen[0].response.log_probs:
                    gaps.append(self._gap(chosen, batch, per_token["log_prob"], gap_from))
        return sums, gaps, n_tokens, n_micro

    def _by_need(self, samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
        """Kept samples that need a gradient, and those that are only measured.

        With advantage 0 the policy term is exactly 0, so without a KL or entropy term the backward pass, two thirds
        of the work, would add zeros. The divisors count such samples all the same.
        """
        extra_terms = self.objective.kl_coef_of_loss or self.objective.entropy_coef
        needed: list[int] = []
        measured: list[int] = []
        for i, s in enumerate(samples):
            if s.kept:
                (needed if extra_terms or s.advantage else measured).append(i)
        return needed, measured

    def micro_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The samples, by number, cut so that each forward pass stays within the bounds on tokens and sequences."""
        sizes = [len(s.response.prompt_ids) + len(s.response.token_ids) for s in samples]
        return within_budget(sizes, self.micro_batch_tokens, self.micro_batch_size)

    def _loss(
        self,
        samples: list[Sample],
        batch: PackedBatch,
        flat: Tensor,
        flat_entropy: Tensor,
        n_sequences: int,
        n_tokens: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the step's loss, and measurements per token (batch, seq).

        `flat` and `flat_entropy` (scored,) are the policy's log-probabilities and entropies, with gradient.
        """
        o = self.objective
        log_probs, entropy, mask = batch.to_rows(flat), batch.to_rows(flat_entropy), batch.response_mask
        on_policy = not any(s.old_log_probs for s in samples)
        old = log_probs.detach() if on_policy else self._rows(batch, [s.old_log_probs for s in samples])
        advantages = torch.tensor([[s.advantage] for s in samples], device=flat.device)  # (batch, 1)
        per_token, stats = LOSSES[o.loss.loss_type](advantages, log_probs, old, mask, **o.loss.numbers())
        if o.has_mismatch_weights:
            engine = self._rows(batch, [s.response.log_probs for s in samples])
            weights, weight_stats = mismatch_weights(old, engine, mask, o.mismatch, o.mismatch_cap)
            per_token, stats = per_token * weights, stats | weight_stats
        if any(s.reference_log_probs for s in samples):
            reference = self._rows(batch, [s.reference_log_probs for s in samples])
            kl = kl_per_token(log_probs, reference, mask, o.kl_estimator, None if on_policy else old)
            per_token, stats = per_token + o.kl_coef_of_loss * kl, stats | {"kl_reference": kl.detach()}
        if o.entropy_coef:
            per_token = per_token + entropy_bonus(entropy, o.entropy_coef)
        norm, counts = o.length_norm.kind, {"n_sequences": n_sequences, "n_tokens": n_tokens}
        loss = aggregate_loss(per_token, mask, norm, **counts, constant=o.length_constant)
        measured = {"entropy": entropy.detach(), "log_prob": log_probs.detach()}
        if "clipped" in stats:
            measured["clip_fraction"] = stats.pop("clipped")
        if on_policy:  # the ratio is 1 by definition: nobody measured it
            stats.pop("ratio", None)
        else:
            log_ratio = log_probs.detach() - old
            measured["ratio"] = log_ratio.exp()
            measured["approx_kl"] = log_ratio.exp() - 1 - log_ratio  # k3 of KL(old || new), from samples of old
        return loss, stats | measured

    def _rows(self, batch: PackedBatch, values: list[list[float]]) -> Tensor:
        """Numbers per response token, sample by sample -> (batch, seq) beside the log-probabilities."""
        return batch.to_rows(torch.tensor([v for row in values for v in row], device=self.policy.device))

    def _gap(self, samples: list[Sample], batch: PackedBatch, log_probs: Tensor, first: int) -> Tensor:
        """|log p_engine - log p_trainer| of the sampled tokens from position `first` on, flat."""
        engine = self._rows(batch, [s.response.log_probs for s in samples])
        return (engine - log_probs).abs()[:, first:][batch.response_mask[:, first:]]

    def _step(self, sums: dict[str, float], gaps: list[Tensor], n_tokens: int, n_micro: int) -> dict[str, float]:
        """Clip, step, forget the gradient. Without any loss, or with a gradient that is not finite, nothing moves."""
        for p in self.parameters:
            if p.grad is None:  # a gradient of zero is still a step: Adam's momentum moves the weights
                p.grad = torch.zeros_like(p)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm).item()
        loss = sums.pop("loss", 0.0)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite and n_micro:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, float] = {
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "train/micro_batches": n_micro,
            "train/skipped_updates": 0 if finite else 1,
            "train/empty_updates": 0 if n_micro else 1,
            "train/tokens": n_tokens if n_micro else 0,
        }
        if not n_micro:  # nothing was measured: zeros would be weighed as values
            return metrics
        metrics |= {"train/loss": loss, "train/grad_norm": norm}
        metrics |= gap_metrics(torch.cat(gaps).tolist() if gaps else [], "rollout")
        return metrics | {f"train/{name}": total / n_tokens for name, total in sums.items()}

    def weights_are_finite(self) -> bool:
        """Whether every trained weight is a number."""
        norms = torch._foreach_norm([p.detach() for p in self.parameters], ord=torch.inf)
        return bool(torch.isfinite(torch.stack([norm.float().cpu() for norm in norms])).all())


def note_entropy(samples: Sequence[Sample], entropy: Tensor) -> None:
    """Give each sample its mean entropy, from (batch, seq) with zeros after its end, unless an earlier step has."""
    for sample, total in zip(samples, entropy.sum(1).tolist(), strict=True):
        if sample.entropy is None and sample.response.token_ids:
            sample.entropy = total / len(sample.response.token_ids)


def averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics over the optimizer steps of one rollout batch: means over those that measured them; counts are added.

    >>> averaged([{"train/loss": 1.0, "train/empty_updates": 0}, {"train/empty_updates": 1}])
    {'train/loss': 1.0, 'train/empty_updates': 1.0}
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        out[name] = sum(values) / (1 if name in COUNTS else len(values))
    return out
