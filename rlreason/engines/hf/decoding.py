"""Sequences of any age decoded in one batch: reading prompts, reading one token of each, drawing the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.kv_cache import PreallocatedCache
from rlreason.model.packing import pack
from rlreason.model.policy import Policy
from rlreason.types import FinishReason

COMPACT_BELOW = 0.8  # the share of sequences alive below which ended ones are dropped and others admitted


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
class SequenceState:
    """One sample under way."""

    place: int  # in the list that `generate` returns
    number: int  # among the samples of its prompt
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    overhang: int = 0  # characters of the text behind the stop string that ended it

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Its random numbers (count,) in [0, 1): by its prompt's seed and its own number alone."""
        return np.random.default_rng([self.prompt.seed, self.number]).random(count)

    def take(self, token: int, log_prob: float, ended: Callable[["SequenceState"], FinishReason | None]) -> bool:
        """Add a sampled token, unless the sequence has ended and waits to be dropped; whether it ended just now."""
        if self.finish_reason is not None:
            return False
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.finish_reason = ended(self)
        return self.finish_reason is not None


class Batch:
    """The sequences under way, one to a row; all have their newest token in the newest column of the cache."""

    def __init__(self, policy: Policy, max_tokens: int) -> None:
        self.policy = policy
        self.sequences: list[SequenceState] = []
        self.cache = PreallocatedCache()
        none = torch.zeros(0, dtype=torch.int64, device=policy.device)
        self.starts = none  # (rows,) the column of each sequence's first token
        self.begun = none  # (rows,) the column of each response's first token
        self.ids = none  # (rows,) the tokens just drawn
        self.uniforms = torch.zeros(0, max_tokens, dtype=torch.float64, device=policy.device)
        self.logits = torch.zeros(0, policy.head.shape[0], device=policy.device)  # (rows, vocab) of the next tokens

    def alive(self) -> int:
        """How many sequences have not ended."""
        return sum(sequence.finish_reason is None for sequence in self.sequences)

    def should_compact(self, alive: int) -> bool:
        """Whether to drop ended sequences: they still cost a step's work, but dropping them costs about one step."""
        return self.cache.full or alive < COMPACT_BELOW * len(self.sequences)

    def compact_and_admit(self, admitted: Sequence[Sequence[SequenceState]] = ()) -> None:
        """Drop the sequences that have ended; admit whole groups (after a step, so that every row waits for a draw)."""
        device = self.policy.device
        kept = [i for i, sequence in enumerate(self.sequences) if sequence.finish_reason is None]
        new = [sequence for group in admitted for sequence in group]
        self.sequences = [self.sequences[i] for i in kept] + new
        index = torch.tensor(kept, dtype=torch.int64, device=device)
        prompt_lengths = torch.tensor([len(s.prompt.token_ids) for s in new], dtype=torch.int64, device=device)
        lengths = torch.cat([self.cache.get_seq_length() - self.starts[index], prompt_lengths])
        width = int(lengths.max())
        shift = width - self.cache.get_seq_length()
        self.starts = width - lengths
        self.begun = torch.cat([self.begun[index] + shift, torch.full_like(prompt_lengths, width)])
        self.ids, self.logits, self.uniforms = self.ids[index], self.logits[index], self.uniforms[index]
        packed, columns = None, index.new_zeros(0, width)
        if new:
            packed, first, ends = self._read_prompts([group[0].prompt for group in admitted])
            repeats = torch.tensor([len(group) for group in admitted], device=device)
            columns = ends.repeat_interleave(repeats)[:, None] + torch.arange(-width, 0, device=device)
            self.logits = torch.cat([self.logits, first.repeat_interleave(repeats, 0)])
            uniforms = torch.from_numpy(np.stack([s.uniforms(self.uniforms.shape[1]) for s in new]))
            self.uniforms = torch.cat([self.uniforms, uniforms.to(device)])  # of sequences that wait: none
        self.cache.compact_and_admit(index, width, packed, columns.clamp(min=0))  # before a start anything may stand

    def _read_prompts(self, prompts: Sequence[Prompt]) -> tuple[DynamicCache, Tensor, Tensor]:
        """The cache of the prompts end to end in one row, without padding; their next logits; where each ends."""
        batch = pack([(prompt.token_ids, []) for prompt in prompts], self.policy.device)
        cache = DynamicCache()
        hidden = self.policy.hidden_states(batch, cache)
        ends = batch.bounds[1:].long()
        return cache, self.policy.logits(hidden[ends - 1]), ends

    def draw(self, sampling: Sampling, banned: Tensor) -> tuple[Tensor, Tensor]:
        """Every row's next token and its log-probability; `banned` tokens only from `min_tokens` on."""
        done = self.cache.get_seq_length() - self.begun  # (rows,) tokens each has
        if min(len(sequence.token_ids) for sequence in self.sequences) < sampling.min_tokens:
            early = (done < sampling.min_tokens)[:, None]
            self.logits[:, banned] = self.logits[:, banned].masked_fill(early, float("-inf"))
        # Sequences that have ended and wait to be dropped draw too, past their last number.
        turn = done.clamp(max=sampling.max_tokens - 1)[:, None]
        self.ids, log_probs = draw(self.logits, self.uniforms.gather(1, turn)[:, 0], sampling.temperature)
        return self.ids, log_probs

    def step(self) -> None:
        """Read the token just drawn for each row."""
        column = self.cache.get_seq_length()
        seen = torch.arange(column + 1, device=self.starts.device) >= self.starts[:, None]
        # Those that wait to be dropped stay within the context: beyond it a position could break the others.
        limit = self.begun - self.starts + self.uniforms.shape[1] - 1
        hidden = self.policy.backbone(
            input_ids=self.ids[:, None],
            position_ids=torch.minimum(column - self.starts, limit)[:, None],
            attention_mask=seen[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        self.logits = self.policy.logits(hidden)
