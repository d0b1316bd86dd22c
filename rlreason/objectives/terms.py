"""What a loss is made of besides its ratio: the KL to a reference, mismatch weights, entropy; and the sums of a step.

Torch is imported where it is called, so that the card and the rules need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlreason.objectives.losses import masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from rlreason.types import Sample


#: Of x = log pi - log ref. k1: unbiased, may be negative; k2: biased as a value, the right gradient as a loss;
#: k3: unbiased, never negative, low variance (expm1 keeps the small values exact).
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: (-x).expm1() + x,
}


def kl_per_token(
    policy_log_probs: Tensor,
    reference_log_probs: Tensor,
    response_mask: Tensor,
    estimator: str,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """The chosen estimator at every response token, 0 elsewhere. Each (batch, seq) -> (batch, seq), in nats.

    Tokens sampled from an older policy: pass `old_log_probs`, and each token is weighted by sg(pi / pi_old),
    so that value and gradient keep the expectations of the table.

    >>> import torch
    >>> pi, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> [kl_per_token(pi, ref, torch.ones(1, 2).bool(), name) for name in KL_ESTIMATORS]
    [tensor([[ 0.6931, -0.6931]]), tensor([[0.2402, 0.2402]]), tensor([[0.1931, 0.3069]])]
    """
    kl = KL_ESTIMATORS[estimator](masked_log_ratio(policy_log_probs, reference_log_probs, response_mask))
    if old_log_probs is None:
        return kl
    return kl * masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp().detach()


def subtract_kl_from_rewards(rewards: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """r - kl_coef * sum over the response of KL, before baseline and normaliser. (n,), (n, seq) -> (n,)

    `kl`: `kl_per_token` of the sampling policy, 0 outside the response. No gradient passes.
    """
    return rewards - kl_coef * kl.detach().sum(-1)


def mismatch_weights(
    old_log_probs: Tensor, engine_log_probs: Tensor, response_mask: Tensor, mismatch: str, mismatch_cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Factors of the per-token loss from w = pi_old / pi_engine. Each (batch, seq) -> (batch, seq)

    `old_log_probs` are the trainer's for the weights that sampled. If the engine's log-probs are used as the
    old ones (w = 1), the loss's own ratio covers the gap. No gradient passes. Stats: `mismatch_ratio` (the
    raw w) and `mismatch_capped` (1 where the cap acted). Outside the response the weight is 1.

    >>> import torch
    >>> old, engine = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.4, 0.1]]).log()
    >>> mismatch_weights(old, engine, torch.ones(1, 2).bool(), "truncate", 2.0)[0]
    tensor([[1.2500, 2.0000]])
    >>> mismatch_weights(old, engine, torch.ones(1, 2).bool(), "mask", 2.0)[0]
    tensor([[1.2500, 0.0000]])
    """
    ratio = masked_log_ratio(old_log_probs, engine_log_probs, response_mask).detach().exp()
    over = ratio > mismatch_cap
    # truncated importance sampling; or the token leaves the numerator, not the divisor
    weights = ratio.clamp(max=mismatch_cap) if mismatch == "truncate" else ratio.masked_fill(over, 0.0)
    return weights, {"mismatch_ratio": ratio, "mismatch_capped": over.to(ratio.dtype)}


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.element_size() == 8 else logits.float()


def _with_float64(x: Tensor) -> Tensor:
    """Return a tensor where there is float64: on the processor if it is on Apple's GPU."""
    return x.cpu() if x.device.type == "mps" else x


def compute_entropy(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats over the last dimension. (batch, seq, vocab) -> (batch, seq)

    A logit of -inf has p = 0 and adds nothing.

    >>> import torch
    >>> compute_entropy(torch.zeros(1, 2, 8))
    tensor([[2.0794, 2.0794]])
    """
    log_probs = _at_least_float32(logits).log_softmax(-1)
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def gather_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) at the same position. (batch, seq, vocab), (batch, seq) int64 -> (batch, seq)"""
    log_probs = _at_least_float32(logits).log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0]


@dataclass(slots=True)
class StepSums:
    """Sums over the micro-batches of a step, on the device, so that no micro-batch waits for the previous one."""

    n_micro: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)  # name -> float64, over response tokens, except `loss`
    places: list[int] = field(default_factory=list)  # indices of the samples, in the order of the following
    entropies: list[Tensor] = field(default_factory=list)  # (sequences,) of each micro-batch, over response tokens
    mismatches: list[Tensor] = field(default_factory=list)  # (scored,) |log p_engine - log p_trainer|
    compared: list[bool] = field(default_factory=list)  # whether each of those tokens counts

    def add(self, places: Sequence[int], loss: Tensor, per_token: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add a micro-batch of the samples with these indices: its loss, and values (batch, seq) per token."""
        self.n_micro += 1
        self.places += places
        self.entropies.append(per_token["entropy"].sum(1))  # zeros after its end
        self._add("loss", loss.detach())
        for name, values in per_token.items():
            self._add(name, values.masked_fill(~mask, 0))

    def _add(self, name: str, values: Tensor) -> None:
        import torch

        total = _with_float64(values).sum(dtype=torch.float64)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def compare(self, samples: Sequence[Sample], engine: Tensor, trainer: Tensor, first: int) -> None:
        """Add log-probabilities (scored,) of engine and trainer; tokens from number `first` on count."""
        self.mismatches.append((engine - trainer).abs())
        for sample in samples:
            self.compared += [number >= first for number in range(len(sample.response.token_ids))]

    def read(self, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Return everything as numbers, including the tensors `more`, with one copy from the device."""
        import torch

        parts = [*self.sums.values(), *more, *self.entropies, *self.mismatches]
        flat = [_with_float64(part).reshape(-1).double() for part in parts]
        values = iter(torch.cat(flat).tolist() if parts else ())
        sums = {name: next(values) for name in self.sums}
        others = [next(values) for _ in more]
        entropies: list[float | None] = [None] * len(samples)
        for place in self.places:
            length, total = len(samples[place].response.token_ids), next(values)
            entropies[place] = total / length if length else None
        mismatches = [value for value, counts in zip(values, self.compared, strict=True) if counts]
        return StepValues(sums, others, entropies, mismatches)


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of `StepSums`, as numbers."""

    sums: dict[str, float]
    more: list[float]
    entropies: list[float | None]  # nats, sample by sample: mean over the response; None if not measured
    mismatches: list[float]  # of the tokens that count


def measured_per_token(
    stats: Mapping[str, Tensor], log_probs: Tensor, entropy: Tensor, old: Tensor | None
) -> dict[str, Tensor]:
    """Return a loss's statistics with entropy, log-probability, ratio and KL to the old policy, each (batch, seq).

        ratio = exp(log pi - log pi_old),    approx_kl = ratio - 1 - log ratio: k3 of KL(old || new), samples of old

    `old`: log pi_old; None on-policy, where the ratio is 1 by definition and is not measured. k3:
    http://joschu.net/blog/kl-approx.html
    """
    found = {name: values for name, values in stats.items() if name not in ("clipped", "ratio")}
    if "clipped" in stats:
        found["clip_fraction"] = stats["clipped"]
    found |= {"entropy": entropy, "log_prob": log_probs}
    if old is not None:
        log_ratio = log_probs - old
        found |= {"ratio": log_ratio.exp(), "approx_kl": log_ratio.exp() - 1 - log_ratio}
    return found


def entropy_bonus(token_entropy: Tensor, entropy_coef: float) -> Tensor:
    """-entropy_coef * H, a term of the per-token loss: a positive coefficient raises entropy. (batch, seq)

    An entropy computed without a gradient would only change the reported loss; that is an error here rather than a
    silent no-op.
    """
    import torch

    if entropy_coef != 0 and torch.is_grad_enabled() and not token_entropy.requires_grad:
        raise ValueError(
            f"entropy_coef={entropy_coef}: the entropy has no gradient, so the bonus would do nothing; "
            "compute the entropy with gradients or set entropy_coef=0"
        )
    return -entropy_coef * token_entropy
