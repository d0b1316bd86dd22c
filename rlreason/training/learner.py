"""One optimizer step: samples with advantages -> loss over micro-batches -> clipped gradient -> new weights.

The divisors of the loss are those of the whole step, so how the step is cut into micro-batches changes
memory and nothing else.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import token_ids
from rlreason.model.packing import PackedBatch
from rlreason.model.parameters import lists_on_device
from rlreason.model.policy import Policy
from rlreason.objectives.aggregation import aggregate_loss, step_divisors
from rlreason.objectives.losses import loss_named
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import (
    StepSums,
    StepValues,
    entropy_bonus,
    kl_per_token,
    measured_per_token,
    mismatch_weights,
)
from rlreason.runtime.statistics import mismatch_metrics
from rlreason.types import Collected, Sample, Update


def make_optimizer(settings: OptimizationConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over all parameters alike, biases and norms included.

    `adamw_8bit` keeps both moments in one byte each, scaled block by block (Dettmers et al. 2022, arXiv:2110.02861):
    2 bytes a parameter where `adamw` takes 8. Tensors of fewer than 4096 numbers keep float32 moments.
    """
    first, second = settings.adam_betas
    rate, decay = settings.peak_learning_rate, settings.weight_decay
    if settings.optimizer == "adamw_8bit":  # bitsandbytes runs on processors from version 0.50 on
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that optimizers do not use
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

        return AdamW8bit(parameters, rate, (first, second), weight_decay=decay)
    # Fused into one pass over memory: on a processor, where it is a tenth of a step, five times faster.
    return torch.optim.AdamW(parameters, rate, (first, second), weight_decay=decay, fused=True)


def learning_rate_at(done: float, width: float, total: float, peak: float, kind: str, warmup: float) -> float:
    """The rate of one update, from where it stands in the run. All lengths are in steps.

        done < warmup:   peak x min(1, (done + width) / warmup)
        constant:        peak
        linear:          peak x (total - done) / (total - warmup)
        cosine:          peak x (1 + cos(pi (done - warmup) / (total - warmup))) / 2

    done: steps finished before this update, a fraction when a step has several updates; width: this update's share
    of a step (1 / updates per step). No update is wasted: the first has a rate above 0, and so has the last. The
    decays are those of transformers' `get_scheduler`, whose warm-up lags one step behind: its first rate is 0.

    >>> [round(learning_rate_at(done, 1, 6, 1.0, "linear", 2), 3) for done in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_at(done / 2, 0.5, 2, 1.0, "cosine", 0), 3) for done in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if done < warmup:
        return peak * min(1.0, (done + width) / warmup)
    if kind == "constant":
        return peak
    progress = min(1.0, (done - warmup) / (total - warmup)) if total > warmup else 1.0
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one optimizer step before clipping; token gradients of samples without loss are 0."""

    loss: float
    parameters: list[Tensor]  # d loss / d parameter, in the order of `Learner.parameters`
    tokens: list[Tensor]  # d loss / d log pi of each response token (length,), sample by sample, on the CPU
    clipped: float  # how many response tokens the loss clipped or capped


class Learner:
    """Owns the optimizer. `updates` takes all updates of a training step, `update` takes one, `gradient` none."""

    sharers = 1  # that divide the micro-batches of an update among them

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
        """`temperature`: of the distribution that is learned; `micro_batch_tokens`: most tokens in one forward pass."""
        self.policy, self.objective, self.settings = policy, objective, optimization
        self.temperature, self.micro_batch_tokens = temperature, micro_batch_tokens
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(optimization, self.parameters)
        # In float16 small gradients would vanish: the loss is multiplied by a scale, which halves when one overflows.
        self.scaler = GradScaler(policy.device.type, enabled=policy.compute_dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=policy.device))  # the scale's tensor, also for a step without a loss
        own_loss = ":" in objective.loss.loss_type  # which may have terms without the advantage
        #: Whether samples with advantage 0 have a gradient, too.
        self.all_learn = bool(own_loss or objective.kl_coef_of_loss or objective.entropy_coef)
        self._start = [p.detach().clone() for p in self.parameters] if can_restart else None

    def updates(self, collected: Collected, step: int, n_steps: int, sampling: Sampling) -> Iterator[Update]:
        """Take the updates of a training step of `n_steps`, one whenever the next is asked for, and yield each.

        A step that restarts from the initial weights is a run of its own. The train-inference mismatch is measured in
        the first update, where the weights are still those that sampled.
        """
        done, total, count, settings = step - 1, n_steps, len(collected.batches), self.settings
        if collected.restart:
            self.restart()
            done, total = 0, 1
        as_sampled = self.temperature == sampling.temperature and not collected.restart
        schedule = settings.peak_learning_rate, settings.lr_schedule, settings.warmup_steps
        for place, batch in enumerate(collected.batches):
            mismatch_from = sampling.min_tokens if place == 0 and as_sampled else None
            yield self.take_step(
                batch, learning_rate_at(done + place / count, 1 / count, total, *schedule), mismatch_from
            )

    def will_score(self, collected: Collected, sampling: Sampling) -> bool:
        """Return whether `updates` will measure all entropies itself: in one update, under the weights that sampled."""
        return len(collected.batches) == 1 and self.temperature == sampling.temperature and not collected.restart

    def update(
        self, samples: Sequence[Sample], learning_rate: float | None = None, mismatch_from: int | None = 0
    ) -> dict[str, float]:
        """Take one optimizer step on `samples`; return its metrics, averaged over its response tokens.

        Samples without `old_log_probs` are on-policy: the current log-probabilities serve as old ones. The mismatch
        between the engine's log-probabilities and ours is measured from token `mismatch_from` on (before it, the
        engine sampled under a ban on ending), or not at all if None.
        """
        return self.take_step(samples, learning_rate, mismatch_from).metrics

    def take_step(self, samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None) -> Update:
        """Clip, step and zero the gradient; without any loss, or with a non-finite gradient, the weights stay."""
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        n_tokens, done = self._backward(samples, mismatch_from)
        for p in self.parameters:
            if p.grad is None:  # a gradient of zero is still a step: Adam's momentum moves the weights
                p.grad = torch.zeros_like(p)
        measured = self.read(done, samples, self.clip())
        (norm,), loss, n_micro = measured.more, measured.sums.pop("loss", 0.0), done.n_micro
        finite, scale = math.isfinite(norm + loss), self.scaler.get_scale()
        overflows = scale > 1 and math.isfinite(loss) and not finite  # a smaller scale may help
        before = sampled_elements(self.parameters)
        gradients = sampled_elements(p.grad for p in self.parameters if p.grad is not None)
        if finite and n_micro:
            self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.weights_moved()
        metrics: dict[str, float] = {
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "train/micro_batches": n_micro,
            "train/skipped_updates": 0 if finite else 1,
            "train/empty_updates": 0 if n_micro else 1,
            "train/tokens": n_tokens if n_micro else 0,
        }
        if self.scaler.is_enabled():
            metrics |= {"train/loss_scale": scale, "train/overflows": int(overflows)}
        if not n_micro:  # nothing was measured: zeros would be weighed as values
            return Update(metrics, measured.entropies)
        metrics |= {"train/loss": loss} | mismatch_metrics(measured.mismatches, "rollout")
        if not overflows:
            metrics["train/grad_norm"] = norm
        changed = changed_share(before, sampled_elements(self.parameters), gradients).item()
        if finite and math.isfinite(changed):  # which it is not where every sampled element has a gradient of 0
            metrics["train/weights_changed"] = changed
        metrics |= {f"train/{name}": total / n_tokens for name, total in measured.sums.items()}
        return Update(metrics, measured.entropies)

    def restart(self) -> None:
        """Restore the initial weights and an empty optimizer state."""
        assert self._start is not None, "this learner kept no copy of its first weights: can_restart=False"
        with torch.no_grad():
            for parameter, first in zip(self.parameters, self._start, strict=True):
                parameter.copy_(first)
        self.optimizer.state.clear()
        self.weights_moved()

    def weights_moved(self) -> None:
        """Bring what depends on the weights up to date: nothing in a single process."""

    def gradient(self, samples: Sequence[Sample]) -> Gradient:
        """Return the gradient of `update`'s loss; weights, optimizer and metrics stay unchanged."""
        tokens = [torch.zeros(len(s.response.token_ids)) for s in samples]
        sums = self._backward(samples, token_gradients=tokens)[1].read(samples).sums
        scale = self.scaler.get_scale()
        parameters = [torch.zeros_like(p) if p.grad is None else p.grad.div_(scale) for p in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return Gradient(sums.get("loss", 0.0), parameters, tokens, sums.get("clip_fraction", 0.0))

    def _backward(
        self, samples: Sequence[Sample], mismatch_from: int | None = None, token_gradients: list[Tensor] | None = None
    ) -> tuple[int, StepSums]:
        """Accumulate the step's gradient; return the number of tokens with loss, and the measured sums."""
        lengths = torch.tensor([len(s.response.token_ids) for s in samples])
        has_loss = torch.tensor([s.has_loss for s in samples])
        n_sequences, n_tokens = step_divisors(lengths, has_loss, self.objective.length_norm.kind)
        divisors = {"n_sequences": n_sequences, "n_tokens": n_tokens}
        done = StepSums()
        for with_gradient, places in self.step_micro_batches(samples):
            chosen = [samples[i] for i in places]
            batch = self.policy.pack(token_ids(chosen))
            with torch.set_grad_enabled(with_gradient):
                flat, flat_entropy = self.policy.log_probs(batch, self.temperature)
                loss, per_token = self._loss(chosen, batch, flat, flat_entropy, divisors)
            if with_gradient:
                flat.retain_grad()
                self.scaler.scale(loss).backward()
            if token_gradients is not None and flat.grad is not None:
                for i, part in zip(places, flat.grad.cpu().split(batch.lengths.tolist()), strict=True):
                    token_gradients[i] = part / self.scaler.get_scale()
            done.add(places, loss, per_token, batch.response_mask)
            if mismatch_from is not None and chosen[0].response.log_probs:
                engine = self._flat([s.response.log_probs for s in chosen])
                done.compare(chosen, engine, flat.detach(), mismatch_from)
        return n_tokens, done

    def read(self, done: StepSums, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Return the measured sums, and the tensors `more`, as numbers."""
        return done.read(samples, *more)

    def step_micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """Yield the step's micro-batches: whether each needs a gradient, and the indices of its samples.

        With advantage 0 our policy terms are exactly 0, so without a KL or entropy term the backward pass, two thirds
        of the work, would add zeros: such samples are only measured. The divisors count them all the same.
        """
        for with_gradient in (True, False):
            needs = (bool(self.all_learn or s.advantage) for s in samples)
            members = [i for i, need in enumerate(needs) if samples[i].has_loss and need == with_gradient]
            for rows in self.micro_batches([samples[i] for i in members]):
                yield with_gradient, [members[i] for i in rows]

    def micro_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Group sample indices so that each forward pass stays within the limits on tokens and sequences.

        Passes are small enough for each of the sharers to get one, if there are as many samples.
        """
        sequences = self.settings.sequences_per_micro_batch()
        return self.policy.divide(token_ids(samples), self.micro_batch_tokens, sequences, self.sharers)

    def _loss(
        self,
        samples: list[Sample],
        batch: PackedBatch,
        flat: Tensor,
        flat_entropy: Tensor,
        divisors: dict[str, int],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the step's loss, and measurements per token (batch, seq).

        `flat` and `flat_entropy` (scored,) are the policy's log-probabilities and entropies, with gradient.
        """
        o = self.objective
        log_probs, entropy, mask = batch.to_rows(flat), batch.to_rows(flat_entropy), batch.response_mask
        # Drawn ahead for a loss without a ratio, they are weighted by pi / pi_engine.
        on_policy = (o.samples_ahead and not o.has_ratio) or all(s.old_log_probs is None for s in samples)
        old = log_probs.detach() if on_policy else batch.to_rows(self._flat([s.old_log_probs or [] for s in samples]))
        (advantages,) = lists_on_device([[s.advantage for s in samples]], flat.device, torch.float32)
        advantages = advantages[:, None]  # (batch, 1)
        per_token, stats = loss_named(o.loss.loss_type)(advantages, log_probs, old, mask, **o.loss.numbers())
        if o.has_mismatch_weights:
            engine = batch.to_rows(self._flat([s.response.log_probs for s in samples]))
            weights, weight_stats = mismatch_weights(old, engine, mask, o.mismatch, o.mismatch_cap or math.inf)
            per_token, stats = per_token * weights, stats | weight_stats
        if any(s.reference_log_probs is not None for s in samples):
            reference = batch.to_rows(self._flat([s.reference_log_probs or [] for s in samples]))
            kl = kl_per_token(log_probs, reference, mask, o.kl_estimator, None if on_policy else old)
            kl = kl * weights if o.has_mismatch_weights and o.samples_ahead else kl  # of the policy that sampled, too
            per_token, stats = per_token + o.kl_coef_of_loss * kl, stats | {"kl_reference": kl.detach()}
        if o.entropy_coef:
            per_token = per_token + entropy_bonus(entropy, o.entropy_coef)
        loss = aggregate_loss(per_token, mask, o.length_norm.kind, **divisors, constant=o.length_constant)
        return loss, measured_per_token(stats, log_probs.detach(), entropy.detach(), None if on_policy else old)

    def _flat(self, values: list[list[float]]) -> Tensor:
        """Concatenate per-token numbers of all samples -> (scored,)."""
        return lists_on_device([list(chain.from_iterable(values))], self.policy.device, torch.float32)[0]

    def clip(self) -> Tensor:
        """Divide the gradient by the loss's scale and clip it to `max_grad_norm`; return its norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)

    def weights_are_finite(self) -> bool:
        """Return whether all trained weights are finite."""
        return all(map(is_finite, self.parameters))

    def broken_moments(self) -> set[int]:
        """Return the indices of the trained tensors with a moment that is not finite, on any rank."""
        broken = set()
        for index, parameter in enumerate(self.parameters):
            for moment in self.optimizer.state.get(parameter, {}).values():
                if isinstance(moment, Tensor) and moment.is_floating_point() and not is_finite(moment):
                    broken.add(index)
        return broken

    def moments(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of every trained parameter, in order; of several ranks, the whole tensors."""
        return [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]

    def restore(self, moments: Iterable[dict[str, Any]]) -> None:
        """Load these optimizer moments, one dict per parameter; call after the weights have been replaced.

        Not by the optimizer's own load_state_dict, which would convert 8-bit moments to the parameters' type.
        """
        self.optimizer.state.clear()
        for parameter, state in zip(self.parameters, moments, strict=True):
            if state:  # all on the parameter's device: fused AdamW keeps its step count there too
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
        self.weights_moved()


ELEMENTS = 64  # of each tensor


@torch.no_grad()
def sampled_elements(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy up to 64 elements of each tensor, spread evenly over it; the same ones in every call."""
    return [t.detach().reshape(-1)[:: max(1, -(-t.numel() // ELEMENTS))].clone() for t in map(local, tensors)]


@torch.no_grad()
def changed_share(before: Sequence[Tensor], after: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Share of the elements with a gradient that changed, averaged over the tensors that have any -> scalar.

    Rows of an embedding whose token did not occur have none. NaN if no element has a gradient.

    >>> ones = torch.ones(2)
    >>> changed_share([torch.zeros(2), torch.zeros(2)], [torch.tensor([0.0, 1.0]), torch.zeros(2)], [ones, 0 * ones])
    tensor(0.5000)
    """
    moved = [((a != b) & (g != 0)).sum() / (g != 0).sum() for a, b, g in zip(before, after, gradients, strict=True)]
    return torch.stack(moved).nanmean() if moved else torch.tensor(torch.nan)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, of this process's part, without a copy of the tensor."""
    return bool(torch.isfinite(torch.linalg.vector_norm(local(tensor.detach()), torch.inf)))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is sharded over ranks, or all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
