"""Decode sequences of any age in one batch: read prompts, draw tokens, drop what has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.kv_cache import Move, PreallocatedCache
from rlreason.model.attention import CachedPrompts
from rlreason.model.devices import on_device
from rlreason.model.packing import pack
from rlreason.model.policy import Policy

BLOCK = 256  # tokens whose probabilities are summed before the cumulative sum: as many as the vocabulary has blocks


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at one uniform number per row.

    token = min { v : sum_{w <= v} p(w) > u },  p = softmax(logits / T);  T = 0 takes the most likely token.
    logits (rows, vocab) float32, uniforms (rows,) float64 in [0, 1). Returns token ids (rows,) int64 and their
    natural-log probabilities (rows,) float32 under p (under T = 1 when greedy). No token with p = 0 is drawn.

    >>> ids, lp = draw(torch.tensor([[0.0, float("-inf"), 0.0]]), torch.tensor([0.5], dtype=torch.float64), 1.0)
    >>> ids.tolist(), round(lp.item(), 4)
    ([2], -0.6931)
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    probs = logits.softmax(-1)
    ids = logits.argmax(-1) if temperature == 0 else _inverted(probs, uniforms)
    return ids, probs.gather(1, ids[:, None])[:, 0].log()


def _inverted(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Which token each uniform number falls on: first in which block of the vocabulary, then where in the block."""
    vocab = probs.shape[1]
    if vocab <= 8 * BLOCK:
        return _first_beyond(probs, uniforms)[0]
    even = vocab - vocab % BLOCK
    blocks = probs[:, :even].unflatten(1, (-1, BLOCK)).sum(-1)
    if even < vocab:
        blocks = torch.cat([blocks, probs[:, even:].sum(-1, keepdim=True)], 1)
    block, within = _first_beyond(blocks, uniforms)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0.0)
    return block * BLOCK + _first_beyond(inside, within)[0]


def _first_beyond(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first column with sum_{w <= v} mass(w) > u sum_w mass(w), and which share of its own mass u took.

    masses (rows, columns), uniforms (rows,) float64 in [0, 1]; returns (rows,) int64 and (rows,) float64 in [0, 1].
    """
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, also where rounding took u to 1, so that what is found has a mass of its own.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, column).double()
    share = (target - cumulative.gather(1, column) + mass) / mass
    return column[:, 0], share[:, 0].clamp_(0.0, 1.0)


PROMPT_TOKENS = 8192  # read in one pass, whose memory grows with them
COMPACT_BELOW = 0.8  # the share of sequences alive below which ended ones are dropped and others admitted


@dataclass(frozen=True, slots=True)
class SampleUnderWay:
    """One sample under way."""

    place: int  # in the list that `generate` returns
    number: int  # among the samples of its prompt
    prompt: Prompt

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Its random numbers (count,) in [0, 1): by its prompt's seed and its own number alone."""
        return np.random.default_rng([self.prompt.seed, self.number]).random(count)


@dataclass(slots=True)
class Counts:
    """What a call of `generate` did, for metrics and for the tests that hold its cost."""

    steps: int = 0  # forward passes that read one token of each row
    prompts: int = 0  # forward passes that read prompts
    prompt_tokens: int = 0  # read in them
    reallocations: int = 0  # of the cache
    host_reads: int = 0  # times the processor waited for the device


class Batch:
    """The sequences under way, one to a row; all have their newest token in the newest column of the cache.

    Samples of one prompt follow each other, so that it is kept, and attended to, once for all of them.
    """

    def __init__(
        self, policy: Policy, sampling: Sampling, kinds: Tensor, compiled: Callable[..., Tensor] | None = None
    ) -> None:
        """`kinds` (vocab,) uint8: whether a token ends a response or may (`engine.ENDS`, `engine.MAY`), else 0.

        `compiled` computes the hidden states of a step; left out: the model's backbone.
        """
        self.policy, self.sampling, self.kinds = policy, sampling, kinds
        self.compiled = compiled is not None
        self.read = compiled or (lambda **inputs: policy.backbone(**inputs).last_hidden_state)
        self.counts = Counts()
        self.sequences: list[SampleUnderWay] = []
        self.cache = PreallocatedCache(policy.compute_dtype, policy.device, whole=self.compiled)
        # On the host, so that planning waits for nothing: (rows,) the column of each response's first token, which of
        # the prompts it has, and whether it has ended and waits to be dropped; (prompts,) their tokens.
        self.begun, self.asked = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.ended, self.sizes = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        rows = torch.zeros(0, 1, dtype=torch.int64, device=policy.device)
        self.turn = rows  # (rows, 1) tokens that each has, its last one's number where it waits to be dropped
        self.prompt_lengths = rows  # (rows, 1)
        self.ids = rows  # (rows, 1) the tokens just drawn
        self.tokens = rows.expand(0, sampling.max_tokens)  # (rows, max_tokens) all that were drawn
        self.log_probs = self.tokens.float()  # (rows, max_tokens)
        self.uniforms = self.tokens.double()  # (rows, max_tokens)
        self.mask = self.log_probs[:, None, None]  # (rows, 1, 1, prompt columns + columns) 0: attended to, else -inf
        self.prompts = CachedPrompts([], [], rows, rows)
        self.logits = torch.zeros(0, policy.head.shape[0], device=policy.device)  # (rows, vocab) of the next tokens

    @property
    def alive(self) -> int:
        """How many sequences have not ended."""
        return len(self.ended) - int(self.ended.sum())

    def should_compact(self) -> bool:
        """Whether to drop ended sequences: they still cost a step's work, but dropping them costs about one step."""
        return self.cache.full or self.alive < COMPACT_BELOW * len(self.sequences)

    def compact_and_admit(self, admitted: Sequence[Sequence[SampleUnderWay]] = ()) -> None:
        """Drop the sequences that have ended; admit whole groups (after a step, so that every row waits for a draw)."""
        kept = np.flatnonzero(~self.ended)
        asked = np.unique(self.asked[kept])  # prompts that a kept row has
        new = [sequence for group in admitted for sequence in group]
        sizes = np.array([len(group[0].prompt.token_ids) for group in admitted], np.int64)
        groups = np.repeat(np.arange(len(admitted)), [len(group) for group in admitted])
        lengths = np.concatenate([self.cache.length - self.begun[kept], np.zeros(len(new), np.int64)])
        width = int(lengths.max())
        self.sequences = [self.sequences[i] for i in kept] + new
        self.begun, self.ended = width - lengths, np.zeros(len(lengths), np.bool_)
        self.asked = np.concatenate([np.searchsorted(asked, self.asked[kept]), len(asked) + groups])
        self.sizes = np.concatenate([self.sizes[asked], sizes])
        index, packed, ends = self._on_device(kept), list[DynamicCache](), self._on_device(sizes)
        self.logits = self.logits[index]
        if new:
            packed, first, ends = self._read_prompts([group[0].prompt for group in admitted])
            self.logits = torch.cat([self.logits, first[self._on_device(groups)]])
        self._move_rows(index, new, sizes[groups])
        before = torch.arange(-int(self.sizes.max()), 0, device=self.policy.device)
        columns = (ends[:, None] + before).clamp(min=0)  # of shorter prompts, anything stands before their start
        needed = max(1, self.sampling.max_tokens - int(lengths.min()))
        self.cache.compact_and_admit(Move(index, len(new), width, needed, self._on_device(asked), columns, packed))
        self.counts.reallocations += 1
        self.prompts = self._place_rows()
        own = torch.arange(self.cache.room, device=self.policy.device)
        attends = torch.cat(
            [
                before >= -self._on_device(self.sizes[self.asked])[:, None],
                (own >= self._on_device(self.begun)[:, None]) & (own < width),
            ],
            1,
        )
        self.mask = torch.zeros(attends.shape, device=self.policy.device).masked_fill_(~attends, float("-inf"))
        self.mask = self.mask[:, None, None]

    def _place_rows(self) -> CachedPrompts:
        """Which rows have which prompt; rows of one prompt follow each other, more of them or fewer."""
        keys, values = self.cache.prompts
        if self.compiled:  # a copy for each row: a program for any number of rows of a prompt would be many
            asked, own = self._on_device(self.asked), self._on_device(np.arange(len(self.asked)))
            return CachedPrompts([k[asked] for k in keys], [v[asked] for v in values], own, own)
        counts = np.bincount(self.asked)
        most, first = int(counts.max()), np.cumsum(counts) - counts
        place = self.asked * most + np.arange(len(self.asked)) - first[self.asked]
        rows = np.zeros(len(counts) * most, np.int64)
        rows[place] = np.arange(len(place))
        return CachedPrompts(keys, values, self._on_device(rows), self._on_device(place))

    def _move_rows(self, kept: Tensor, new: Sequence[SampleUnderWay], sizes: NDArray[np.int64]) -> None:
        """Keep these rows of what is kept for each sequence, and begin the new ones'; their random numbers, too."""
        drawn = np.stack([s.uniforms(self.sampling.max_tokens) for s in new]) if new else None
        self.uniforms = self.uniforms[kept]
        if drawn is not None:  # of sequences that wait: none
            self.uniforms = torch.cat([self.uniforms, on_device(torch.from_numpy(drawn), self.policy.device)])

        def grown(rows: Tensor) -> Tensor:
            return torch.cat([rows[kept], rows.new_zeros(len(new), rows.shape[1])])

        self.turn, self.ids, self.tokens = grown(self.turn), grown(self.ids), grown(self.tokens)
        self.log_probs = grown(self.log_probs)
        self.prompt_lengths = torch.cat([self.prompt_lengths[kept], self._on_device(sizes)[:, None]])

    def _read_prompts(self, prompts: Sequence[Prompt]) -> tuple[list[DynamicCache], Tensor, Tensor]:
        """The caches of the prompts end to end, without padding, row after row; their next logits; where each ends."""
        caches: list[DynamicCache] = []
        logits, ends, before = list[Tensor](), list[Tensor](), 0
        for some in _rows_of(prompts):
            batch = pack([(prompt.token_ids, []) for prompt in some], self.policy.device)
            caches.append(DynamicCache())
            hidden = self.policy.hidden_states(batch, caches[-1])
            bounds = batch.bounds[1:].long()
            logits.append(self.policy.logits(hidden[bounds - 1]))
            ends.append(bounds + before)
            before += len(hidden)
        self.counts.prompts += len(caches)
        self.counts.prompt_tokens += before
        return caches, torch.cat(logits), torch.cat(ends)

    def draw(self, banned: Tensor) -> NDArray[np.int64]:
        """Draw every row's next token; which rows it may have ended. `banned` tokens only from `min_tokens` on."""
        sampling, done = self.sampling, self.cache.length - self.begun  # (rows,) tokens each has
        if int(done.min()) < sampling.min_tokens:
            early = self.turn < sampling.min_tokens
            self.logits[:, banned] = self.logits[:, banned].masked_fill(early, float("-inf"))
        # Sequences that have ended and wait to be dropped draw too, over their last number.
        ids, log_probs = draw(self.logits, self.uniforms.gather(1, self.turn)[:, 0], sampling.temperature)
        self.ids = ids[:, None]
        self.tokens.scatter_(1, self.turn, self.ids)
        self.log_probs.scatter_(1, self.turn, log_probs[:, None])
        kinds = self._on_host(self.kinds[ids])
        return np.flatnonzero(~self.ended & ((kinds > 0) | (done + 1 >= sampling.max_tokens)))

    def token_ids(self, rows: NDArray[np.int64]) -> list[list[int]]:
        """Every token that these rows have drawn."""
        return self._lists(self.tokens, rows)

    def end(self, rows: NDArray[np.int64]) -> list[list[float]]:
        """Mark these rows as ended; the log-probabilities of their tokens."""
        self.ended[rows] = True
        return self._lists(self.log_probs, rows)

    def _lists(self, values: Tensor, rows: NDArray[np.int64]) -> list[list[Any]]:
        sizes = self.cache.length - self.begun[rows] + 1
        several = self._on_host(values[self._on_device(rows), : int(sizes.max())])
        return [row[:size].tolist() for row, size in zip(several, sizes.tolist(), strict=True)]

    def step(self) -> None:
        """Read the token just drawn for each row."""
        before = self.mask.shape[-1] - self.cache.room  # columns of the prompts
        self.mask[..., before + self.cache.length] = 0.0
        hidden = self.read(
            input_ids=self.ids,
            position_ids=self.prompt_lengths + self.turn,
            attention_mask=self.mask[..., : before + self.cache.seen],
            prompts=self.prompts,
            past_key_values=self.cache,
            use_cache=True,
        )[:, 0]
        self.cache.advance()
        # Those that wait to be dropped stay within the context: beyond it a position could break the others.
        self.turn = (self.turn + 1).clamp_(max=self.sampling.max_tokens - 1)
        self.logits = self.policy.logits(hidden)
        self.counts.steps += 1

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return on_device(torch.from_numpy(numbers), self.policy.device)

    def _on_host(self, values: Tensor) -> NDArray[Any]:
        self.counts.host_reads += 1
        return values.cpu().numpy()


class UnpaddedBatch(Batch):
    """Sequences that begin together behind prompts of one length: no padding gets into a state that layers carry."""

    def compact_and_admit(self, admitted: Sequence[Sequence[SampleUnderWay]] = ()) -> None:
        """Drop the sequences that have ended; admit groups with prompts of one length, where none is left."""
        kept, new = np.flatnonzero(~self.ended), [sequence for group in admitted for sequence in group]
        self.sequences, rows = [self.sequences[i] for i in kept] + new, self._on_device(kept)
        self.begun, self.ended = np.zeros(len(self.sequences), np.int64), np.zeros(len(self.sequences), np.bool_)
        self._move_rows(rows, new, np.zeros(len(new), np.int64))
        if new:  # each prompt is read once
            self.cache.length, self.cache.room = 0, self.sampling.max_tokens  # it counts columns, and holds nothing
            self.own = own = DynamicCache(config=self.policy.model.config)
            self.read = lambda input_ids, **_: self.policy.read(input_ids, own)
            prompts = self._on_device(np.array([group[0].prompt.token_ids for group in admitted]))
            self.logits = self.policy.logits(self.read(input_ids=prompts)[:, -1])
            rows = self._on_device(np.repeat(np.arange(len(admitted)), [len(group) for group in admitted]))
        self.own.reorder_cache(rows)  # type: ignore[arg-type]  # any tensor of row numbers
        self.logits = self.logits[rows]


def _rows_of(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """The prompts, in order, in rows of at most `PROMPT_TOKENS` tokens; one that is longer has a row to itself."""
    rows, free = list[list[Prompt]](), 0
    for prompt in prompts:
        size = len(prompt.token_ids)
        if not rows or size > free:
            rows.append([])
            free = PROMPT_TOKENS
        rows[-1].append(prompt)
        free -= size
    return rows
