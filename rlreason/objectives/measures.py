"""From logits to log-probs and entropies, the entropy bonus, and the sums measured in an optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlreason.types import Sample


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def compute_entropy(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats over the last dimension. (batch, seq, vocab) -> (batch, seq)

    A logit of -inf has p = 0 and adds nothing.

    >>> compute_entropy(torch.zeros(1, 2, 8))
    tensor([[2.0794, 2.0794]])
    """
    log_probs = torch.log_softmax(_at_least_float32(logits), dim=-1)
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def gather_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) at the same position. (batch, seq, vocab), (batch, seq) int64 -> (batch, seq)"""
    log_probs = torch.log_softmax(_at_least_float32(logits), dim=-1)
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
        total = values.sum(dtype=torch.float64)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def compare(self, samples: Sequence[Sample], engine: Tensor, trainer: Tensor, first: int) -> None:
        """Add log-probabilities (scored,) of engine and trainer; tokens from number `first` on count."""
        self.mismatches.append((engine - trainer).abs())
        for sample in samples:
            self.compared += [number >= first for number in range(len(sample.response.token_ids))]

    def read(self, samples: Sequence[Sample], *more: Tensor) -> "StepValues":
        """Return everything as numbers, including the tensors `more`, with one copy from the device."""
        parts = [*self.sums.values(), *more, *self.entropies, *self.mismatches]
        values = torch.cat([part.reshape(-1).double() for part in parts]).tolist() if parts else []
        sums = dict(zip(self.sums, values, strict=False))
        at = len(sums) + len(more)
        entropies: list[float | None] = [None] * len(samples)
        for place, total in zip(self.places, values[at:], strict=False):
            length = len(samples[place].response.token_ids)
            entropies[place] = total / length if length else None
        mismatches = values[at + len(self.places) :]
        kept = [value for value, counts in zip(mismatches, self.compared, strict=True) if counts]
        return StepValues(sums, values[len(sums) : at], entropies, kept)


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
    if entropy_coef != 0 and torch.is_grad_enabled() and not token_entropy.requires_grad:
        raise ValueError(
            f"entropy_coef={entropy_coef}: the entropy has no gradient, so the bonus would do nothing; "
            "compute the entropy with gradients or set entropy_coef=0"
        )
    return -entropy_coef * token_entropy
