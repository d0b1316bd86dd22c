"""One optimizer step: samples with advantages -> loss over micro-batches -> clipped gradient -> new weights.

The divisors of the loss are those of the whole step, so how the step is cut into micro-batches changes
memory and nothing else.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlreason.config.training import OptimizationConfig
from rlreason.model.checks import changed_share, not_finite, sampled_elements
from rlreason.model.devices import lists_on_device
from rlreason.model.packing import PackedBatch
from rlreason.model.policy import Policy
from rlreason.objectives.aggregation import aggregate_loss, step_divisors
from rlreason.objectives.losses import loss_named
from rlreason.objectives.measures import StepSums, entropy_bonus, measured_per_token
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import kl_per_token, mismatch_weights
from rlreason.runtime.intervals import mismatch_metrics
from rlreason.runtime.signals import held
from rlreason.training.optimization import LearningRateSchedule, make_optimizer, put_moments
from rlreason.types import Collected, Sample, Update

if TYPE_CHECKING:
    from rlreason.engines.base import Sampling


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one optimizer step would follow, before clipping. Samples that carry no loss have token gradients 0."""

    loss: float
    parameters: list[Tensor]  # d loss / d parameter, in the order of `Learner.parameters`
    tokens: list[Tensor]  # d loss / d log pi of each response token (length,), sample by sample, on the CPU
    clipped: float  # how many response tokens the loss clipped or capped


Counted = Callable[[Update], object]  # is called with an update as soon as its weights have moved


class Learner:
    """Holds the optimizer. `learn` takes all steps that one collection asks for, `update` is one of them, `gradient`
    what that step would follow.
    """

    world = 1  # processes that learn together

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

    def learn(
        self,
        collected: Collected,
        step: int,
        schedule: LearningRateSchedule,
        sampling: "Sampling",
        counted: Counted,
        taken: int = 0,
    ) -> Iterator[Update]:
        """Take the optimizer steps of step 1, 2, ... of a run, each when it is asked for; all but the first `taken`.

        The train-inference mismatch is measured in the first, whose weights are those that sampled.
        """
        if collected.restart and not taken:
            self.restart()
        count, comparable = len(collected.batches), self._as_sampled(collected, sampling)
        for place, batch in list(enumerate(collected.batches))[taken:]:
            rate = schedule.at(0 if collected.restart else step - 1, place, count, restarts=collected.restart)
            yield self.take(batch, rate, sampling.min_tokens if comparable and place == 0 else None, counted)

    def scores_by_learning(self, collected: Collected, sampling: "Sampling") -> bool:
        """Whether `learn` measures the entropies of what it learns from under the weights that sampled."""
        return len(collected.batches) == 1 and self._as_sampled(collected, sampling)

    def _as_sampled(self, collected: Collected, sampling: "Sampling") -> bool:
        """Whether the first update scores the distribution that was sampled: same weights, same temperature."""
        return self.temperature == sampling.temperature and not collected.restart

    def update(
        self, samples: Sequence[Sample], learning_rate: float | None = None, mismatch_from: int | None = 0
    ) -> dict[str, float]:
        """One optimizer step on `samples`; returns its metrics, averaged over all its response tokens.

        Samples without `old_log_probs` are on-policy: their old log-probabilities are today's. The mismatch
        between the engine's log-probabilities and ours is measured from token `mismatch_from` on (before it, the
        engine sampled under a ban on ending), or not at all.
        """
        return self.take(samples, learning_rate, mismatch_from, lambda update: None).metrics

    def take(
        self, samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None, counted: Counted
    ) -> Update:
        """A signal that ends the run comes before the weights move, or after they are `counted` as moved."""
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        n_tokens, sums = self._backward(samples, mismatch_from)
        with held():
            update = self._step(samples, n_tokens, sums)
            counted(update)
        return update

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
        sums = self._backward(samples, token_gradients=tokens)[1].read(samples).sums
        parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return Gradient(sums.get("loss", 0.0), parameters, tokens, sums.get("clip_fraction", 0.0))

    def _backward(
        self, samples: Sequence[Sample], mismatch_from: int | None = None, token_gradients: list[Tensor] | None = None
    ) -> tuple[int, StepSums]:
        """Add the step's gradient to the parameters; how many response tokens carry loss, and what was measured."""
        lengths = torch.tensor([len(s.response.token_ids) for s in samples])
        has_loss = torch.tensor([s.has_loss for s in samples])
        n_sequences, n_tokens = step_divisors(lengths, has_loss, self.objective.length_norm.kind)
        done = self.new_sums()
        for with_gradient, places in self.dealt(samples):
            chosen = [samples[i] for i in places]
            batch = self.policy.pack(_pairs(chosen))
            with torch.set_grad_enabled(with_gradient):
                flat, flat_entropy = self.policy.log_probs(batch, self.temperature)
                loss, per_token = self._loss(chosen, batch, flat, flat_entropy, n_sequences, n_tokens)
            if with_gradient:
                flat.retain_grad()
                loss.backward()
            if token_gradients is not None and flat.grad is not None:
                for i, part in zip(places, flat.grad.cpu().split(batch.lengths.tolist()), strict=True):
                    token_gradients[i] = part
            done.add(places, loss, per_token, batch.response_mask)
            if mismatch_from is not None and chosen[0].response.log_probs:
                engine = self._flat([s.response.log_probs for s in chosen])
                done.compare(chosen, engine, flat.detach(), mismatch_from)
        return n_tokens, done

    def new_sums(self) -> StepSums:
        """Empty sums for a step."""
        return StepSums()

    def dealt(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """The micro-batches of a step: whether each needs a gradient, and its samples, by number."""
        for with_gradient, members in zip((True, False), self._by_need(samples), strict=True):
            for rows in self.micro_batches([samples[i] for i in members]):
                yield with_gradient, [members[i] for i in rows]

    def _by_need(self, samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
        """Samples with loss that need a gradient, and those that are only measured.

        With advantage 0 the policy term is exactly 0, so without a KL or entropy term the backward pass, two thirds
        of the work, would add zeros. The divisors count such samples all the same.
        """
        extra_terms = self.objective.kl_coef_of_loss or self.objective.entropy_coef
        needed: list[int] = []
        measured: list[int] = []
        for i, s in enumerate(samples):
            if s.has_loss:
                (needed if extra_terms or s.advantage else measured).append(i)
        return needed, measured

    def micro_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The samples, by number, cut so that each forward pass stays within the bounds on tokens and sequences."""
        return self.policy.divide(_pairs(samples), self.micro_batch_tokens, self.micro_batch_size)

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
        on_policy = all(s.old_log_probs is None for s in samples)
        old = log_probs.detach() if on_policy else batch.to_rows(self._flat([s.old_log_probs or [] for s in samples]))
        (advantages,) = lists_on_device([[s.advantage for s in samples]], flat.device, torch.float32)
        advantages = advantages[:, None]  # (batch, 1)
        per_token, stats = loss_named(o.loss.loss_type)(advantages, log_probs, old, mask, **o.loss.numbers())
        if o.has_mismatch_weights:
            engine = batch.to_rows(self._flat([s.response.log_probs for s in samples]))
            weights, weight_stats = mismatch_weights(old, engine, mask, o.mismatch, o.mismatch_cap)
            per_token, stats = per_token * weights, stats | weight_stats
        if any(s.reference_log_probs is not None for s in samples):
            reference = batch.to_rows(self._flat([s.reference_log_probs or [] for s in samples]))
            kl = kl_per_token(log_probs, reference, mask, o.kl_estimator, None if on_policy else old)
            per_token, stats = per_token + o.kl_coef_of_loss * kl, stats | {"kl_reference": kl.detach()}
        if o.entropy_coef:
            per_token = per_token + entropy_bonus(entropy, o.entropy_coef)
        counts = {"n_sequences": n_sequences, "n_tokens": n_tokens}
        loss = aggregate_loss(per_token, mask, o.length_norm.kind, **counts, constant=o.length_constant)
        return loss, measured_per_token(stats, log_probs.detach(), entropy.detach(), None if on_policy else old)

    def _flat(self, values: list[list[float]]) -> Tensor:
        """Numbers per response token, sample by sample -> (scored,)"""
        return lists_on_device([list(chain.from_iterable(values))], self.policy.device, torch.float32)[0]

    def _step(self, samples: Sequence[Sample], n_tokens: int, done: StepSums) -> Update:
        """Clip, step, forget the gradient. Without any loss, or with a gradient that is not finite, nothing moves."""
        for p in self.parameters:
            if p.grad is None:  # a gradient of zero is still a step: Adam's momentum moves the weights
                p.grad = torch.zeros_like(p)
        measured = done.read(samples, self.clip())
        (norm,), loss, n_micro = measured.more, measured.sums.pop("loss", 0.0), done.n_micro
        finite = math.isfinite(norm) and math.isfinite(loss)
        before = sampled_elements(self.parameters)
        gradients = sampled_elements(p.grad for p in self.parameters if p.grad is not None)
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
            return Update(metrics, measured.entropies)
        metrics |= {"train/loss": loss, "train/grad_norm": norm} | mismatch_metrics(measured.mismatches, "rollout")
        changed = changed_share(before, sampled_elements(self.parameters), gradients).item()
        if finite and math.isfinite(changed):  # which it is not where every sampled element has a gradient of 0
            metrics["train/weights_changed"] = changed
        metrics |= {f"train/{name}": total / n_tokens for name, total in measured.sums.items()}
        return Update(metrics, measured.entropies)

    def clip(self) -> Tensor:
        """Scale the gradient down to `max_grad_norm`; returns the norm that it had."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)

    def weights_are_finite(self) -> bool:
        """Whether every trained weight is a number."""
        norms = torch._foreach_norm([p.detach() for p in self.parameters], ord=torch.inf)
        return bool(torch.isfinite(torch.stack([norm.float().cpu() for norm in norms])).all())

    def moments_not_finite(self) -> int:
        """How many trained weight tensors have moments in the optimizer that are no numbers."""
        return len(not_finite(self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state))

    def restore(self, moments: Sequence[dict[str, Any]]) -> None:
        """Have these moments, parameter by parameter; to be called when the weights have been replaced as well."""
        put_moments(self.optimizer, self.parameters, moments)

    def write_moments(self, folder: Path) -> None:
        """Where moments are spread over ranks: write them into a folder. Others stand among a checkpoint's tensors."""

    def close(self) -> None:
        """There is nothing more to learn."""


def _pairs(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    return [(s.response.prompt_ids, s.response.token_ids) for s in samples]
