"""Check after every weight sync that an engine with its own copy of the weights has the trainer's.

1. Tensors: every weight that the engine keeps in the trainer's layout must equal the trainer's bit by bit after
   the cast. This finds a lost or stale tensor however little training changed it.
2. A probe: the engine continues a fixed prompt, and both sides compute the log-probabilities of those tokens. This
   finds what tensors do not show: a stale packed copy, a cache of old keys and values, another temperature.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlreason.engines.base import Prompt, Sampling

PROBE_PROMPT = 160  # tokens: longer than any engine's prefix-cache block (16 to 128), so a stale cache would be used
PROBE_TOKENS = 8
PROBE = Sampling(max_tokens=PROBE_TOKENS)  # temperature 1, a scorer's default


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """The result of one check. `mismatch` and `bound` are in nats per token."""

    mismatch: float  # |log p_engine - log p_trainer|, the largest over the probe's tokens
    bound: float
    compared: int  # tensors that could be compared
    differing: tuple[str, ...]  # names of those that differ from the trainer's

    @property
    def holds(self) -> bool:
        """Whether the engine has the trainer's weights. A mismatch of nan or a check without tensors does not hold."""
        return self.mismatch <= self.bound and self.compared > 0 and not self.differing

    def __str__(self) -> str:
        names = ", ".join(self.differing[:3]) + (" ..." if len(self.differing) > 3 else "")
        return (
            f"the probe's log-probabilities differ by {self.mismatch:.3g} nats (bound {self.bound:g}), "
            f"{len(self.differing)} of {self.compared} compared tensors differ" + (f" ({names})" if names else "")
        )


def mismatch_bound(dtype: torch.dtype) -> float:
    """The largest train-inference mismatch of a token that rounding alone explains, in nats.

    float32: 2e-5 is measured between kernels, 2e-4 at worst, and the bound is 1e-3. bfloat16 keeps 8 bits, so hidden
    states differ by some 2^-8 of themselves and logits of size 20 by tenths. Measured over twelve such probes: at most
    0.12 for a pretrained model, 0.36 for one with large random weights; the bound is 0.5.
    """
    return 1e-3 if dtype == torch.float32 else 0.5


def probe_prompt(vocab: int, context: int) -> Prompt:
    """Return the probe's prompt: the same tokens for every weight sync, spread over the whole vocabulary."""
    length = max(1, min(PROBE_PROMPT, context - PROBE_TOKENS))
    generator = torch.Generator().manual_seed(0)
    return Prompt("probe", torch.randint(vocab, (length,), generator=generator).tolist(), seed=0)


def largest_mismatch(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Return max |a - b| over the probe's tokens; infinite when a number is missing or not finite.

    >>> largest_mismatch([-1.0, -2.0], [-1.0, -2.5]), largest_mismatch([float("nan")], [0.0]), largest_mismatch([], [])
    (0.5, inf, inf)
    """
    if len(engine) != len(trainer) or not engine:
        return float("inf")
    mismatches = [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
    return max(mismatches) if all(m < float("inf") for m in mismatches) else float("inf")


def differing_tensors(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], fused: Mapping[str, Sequence[str]]
) -> tuple[int, tuple[str, ...]]:
    """Compare the trainer's weights with the engine's: return how many could be compared, and the names that differ.

    `fused` maps the layers that the engine stacks from several of the trainer's along the first axis (qkv_proj of
    q_proj, k_proj, v_proj). Weights in a packed layout are left out: the probe covers them. Rows after the trainer's
    last one are the engine's padding.
    """
    own = dict(model.named_parameters())
    part_of = {part: (whole, parts) for whole, parts in fused.items() for part in parts}
    used: dict[str, int] = {}  # rows of a fused layer compared so far
    compared, differing = 0, []
    for name, weight in weights:
        module, _, kind = name.rpartition(".")
        path, dot, layer = module.rpartition(".")
        whole, parts = part_of.get(layer, (layer, (layer,)))
        key = f"{path}{dot}{whole}.{kind}"
        held, start = own.get(key), used.get(key, 0)
        if held is None or held.shape[1:] != weight.shape[1:] or held.shape[0] < start + len(weight):
            continue
        used[key] = start + len(weight) if len(parts) > 1 else 0
        rows = held.detach()[start : start + len(weight)]
        compared += 1
        if not torch.equal(rows, weight.to(dtype=rows.dtype, device=rows.device)):
            differing.append(name)
    return compared, tuple(differing)
