"""Rows decoded side by side, of any age: reading prompts, reading one token per row, drawing the next.

It must not know when a row ends, which prompts wait, or what becomes of a response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.slab import SlabCache
from rlreason.packing import pack
from rlreason.policy import Policy
from rlreason.types import FinishReason


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at one uniform number per row.

    token = min { v : sum_{w <= v} p(w) > u },  p = softmax(logits / T);  T = 0 takes the most likely token.
    logits (rows, vocab) float32, uniforms (rows,) float64 in [0, 1). Returns token ids (rows,) int64 and their
    natural-log probabilities (rows,) float32 under p (under T = 1 when greedy).

    >>> ids, lp = draw(torch.tensor([[0.0, float("-inf"), 0.0]]), torch.tensor([0.5], dtype=torch.float64), 1.0)
    >>> ids.tolist(), round(lp.item(), 4)
    ([2], -0.6931)
    """
    log_probs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = log_probs.argmax(-1)
    else:
        mass = log_probs.exp().cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)[:, 0]
        ids = ids.clamp(max=logits.shape[1] - 1)
    return ids, log_probs.gather(1, ids[:, None])[:, 0]


@dataclass(slots=True)
class Row:
    """One sample under way."""

    place: int  # in the list that `generate` returns
    prompt: Prompt
    uniforms: np.ndarray  # (max_tokens + 1,) float64: a full row that waits to be dropped still draws
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token: int, log_prob: float, ended: Callable[["Row"], FinishReason | None]) -> bool:
        """Add a sampled token, unless the row has ended and only waits to be dropped; whether it has ended just now."""
        if self.finish_reason is not None:
            return False
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.finish_reason = ended(self)
        return self.finish_reason is not None


class Batch:
    """The rows under way. Between steps, `logits` (rows, vocab) belong to every row's next token."""

    def __init__(self, policy: Policy, longest: int) -> None:
        self.policy = policy
        self.longest = longest  # no prompt and response together hold more tokens
        self.rows: list[Row] = []
        self.cache = SlabCache()
        self.starts = torch.zeros(0, dtype=torch.int64, device=policy.device)  # (rows,) first column of each row
        self.logits = torch.zeros(0, policy.head.shape[0], device=policy.device)

    def renew(self, joining: Sequence[Sequence[Row]]) -> None:
        """Drop the rows that have ended and let whole groups join, each of which has one prompt, read once.

        The prompts are read end to end in one packed row, so that neither their padding nor their number costs
        anything; each row then gets a copy that ends in the column where the other rows stand.
        """
        device = self.policy.device
        kept = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        self.rows = [self.rows[i] for i in kept] + [row for group in joining for row in group]
        lengths = [len(row.prompt.token_ids) + len(row.token_ids) for row in self.rows]
        width, index = max(lengths), torch.tensor(kept, dtype=torch.int64, device=device)
        self.starts = width - torch.tensor(lengths, device=device)
        self.logits = self.logits[index]
        packed, columns = None, index.new_zeros(0, width)
        if joining:
            prompts = pack([(row.prompt.token_ids, []) for row, *_ in joining], device)
            packed = DynamicCache()
            hidden = self.policy.backbone(
                input_ids=prompts.input_ids,
                position_ids=prompts.position_ids,
                past_key_values=packed,
                use_cache=True,
                cu_seq_lens_q=prompts.bounds,
                cu_seq_lens_k=prompts.bounds,
                max_length_q=prompts.longest,
                max_length_k=prompts.longest,
            ).last_hidden_state[0]
            repeats = torch.tensor([len(group) for group in joining], device=device)
            ends = prompts.bounds[1:].long()
            first = self.policy.logits(hidden[ends - 1])
            self.logits = torch.cat([self.logits, first.repeat_interleave(repeats, 0)])
            columns = ends.repeat_interleave(repeats)[:, None] + torch.arange(-width, 0, device=device)
        self.cache.renew(index, width, packed, columns.clamp(min=0))  # in front of a start anything may stand

    def draw(self, sampling: Sampling, banned: Tensor) -> tuple[Tensor, Tensor]:
        """Every row's next token and its log-probability; `banned` tokens only from `min_tokens` on."""
        device, counts = self.policy.device, [len(row.token_ids) for row in self.rows]
        if min(counts) < sampling.min_tokens:
            early = torch.tensor([count < sampling.min_tokens for count in counts], device=device)
            self.logits[:, banned] = self.logits[:, banned].masked_fill(early[:, None], float("-inf"))
        uniforms = np.array([row.uniforms[count] for row, count in zip(self.rows, counts, strict=True)])
        return draw(self.logits, torch.from_numpy(uniforms).to(device), sampling.temperature)

    def step(self, ids: Tensor) -> None:
        """Read the token just drawn for each row."""
        column = self.cache.get_seq_length()
        # Rows that have ended and wait to be dropped go on; a position past the context could break the others.
        positions = (column - self.starts).clamp(max=self.longest - 1)
        seen = torch.arange(column + 1, device=ids.device) >= self.starts[:, None]
        hidden = self.policy.backbone(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            attention_mask=seen[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        self.logits = self.policy.logits(hidden)
