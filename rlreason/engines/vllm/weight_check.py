"""Check after every weight sync that the engine has the trainer's weights.

The check has two parts:

1. Tensors: every weight that the engine keeps in the trainer's layout must equal the trainer's bit by bit after
   the cast, by digests of its rows. This finds a lost or stale tensor however little training changed it.
2. A probe: the engine continues a fixed prompt, and both sides compute the log-probabilities of those tokens. This
   finds what tensors do not show: a stale packed copy, a cache of old keys and values, another temperature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

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


class Digest(NamedTuple):
    """A weight's shape and the digests of its rows, which tell it from any other without sending it."""

    shape: tuple[int, ...]
    rows: bytes  # an int64 for each

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Digest a weight."""
        return cls(tuple(weight.shape), row_digests(weight).cpu().numpy().tobytes())


def differing_tensors(
    engine: Mapping[str, Digest], trainer: Mapping[str, Digest], fused: Mapping[str, Sequence[str]]
) -> tuple[int, tuple[str, ...]]:
    """Compare the trainer's weights with the engine's: return how many could be compared, and the names that differ.

    `fused` maps the layers that the engine stacks from several of the trainer's along the first axis (qkv_proj of
    q_proj, k_proj, v_proj). Weights in a packed layout are left out: the probe covers them. Rows after the trainer's
    last one are the engine's padding.
    """
    part_of = {part: (whole, parts) for whole, parts in fused.items() for part in parts}
    used: dict[str, int] = {}  # rows of a fused layer compared so far
    compared, differing = 0, []
    for name, ours in trainer.items():
        module, _, kind = name.rpartition(".")
        path, dot, layer = module.rpartition(".")
        whole, parts = part_of.get(layer, (layer, (layer,)))
        key = f"{path}{dot}{whole}.{kind}"
        theirs, start = engine.get(key), used.get(key, 0)
        end = start + ours.shape[0]
        if theirs is None or theirs.shape[1:] != ours.shape[1:] or theirs.shape[0] < end:
            continue
        used[key] = end if len(parts) > 1 else 0
        compared += 1
        if theirs.rows[DIGEST * start : DIGEST * end] != ours.rows:
            differing.append(name)
    return compared, tuple(differing)


DIGEST = 8  # bytes of a row's digest


def row_digests(weight: Tensor) -> Tensor:
    """Digest each row, (rows, ...) -> (rows,): the sum over a row's indices j of bits_j * odd_j, modulo 2^64.

    An odd factor is invertible modulo 2^64, so one changed number always changes the digest; the factors differ, so
    exchanged numbers do too.

    >>> row_digests(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).unique().numel()
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    return torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number


def repack_tied_head(model: nn.Module) -> None:
    """Renew the packed copy of a tied output head that vLLM uses on the processor; a reload leaves it stale."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)
