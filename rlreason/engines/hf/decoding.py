"""Decode sequences of any age in one batch: read prompts, draw tokens, drop ended sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlreason.engines.base import Prompt, Sampling
from rlreason.model.attention import CachedPrompts
from rlreason.model.packing import pack
from rlreason.model.parameters import on_device
from rlreason.model.policy import Policy

HEADROOM = 64  # most free columns after a compaction, or a quarter of those in use where that is more


@dataclass(frozen=True, slots=True)
class Move:
    """A change of the cache: which rows and prompts stay, and which are added."""

    rows: Tensor  # indices of the rows to keep
    new_rows: int  # rows to add
    width: int  # columns in use of the longest response
    needed: int  # most columns that are still to be written
    prompts: Tensor  # indices of the prompts to keep
    columns: Tensor  # (new prompts, columns of the longest prompt) where to read them in `packed`
    packed: Sequence[DynamicCache]  # the model's caches of packed rows of prompts; `columns` numbers them as one


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, each (rows, kv_heads, columns, head_dim); `length` columns are in use.

    Those of the prompts are (prompts, kv_heads, columns, head_dim), every column in use.
    """

    def __init__(self, at: Tensor, dtype: torch.dtype, whole: bool, **kwargs: Any) -> None:
        """`at`: the next column, on the device; `whole`: every column is read, also free ones, which the mask hides."""
        super().__init__(**kwargs)
        self.at, self.dtype, self.whole = at, dtype, whole
        self.length = 0
        self.prompt_keys: Tensor | None = None
        self.prompt_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest keys and values (rows, kv_heads, 1, head_dim) in place; return all of them so far."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.at, key_states.to(self.dtype))
        self.values.index_copy_(2, self.at, value_states.to(self.dtype))
        if self.whole:
            return self.keys, self.values
        return self.keys[:, :, : self.length + 1], self.values[:, :, : self.length + 1]

    def compact_and_admit(self, move: Move, room: int, packed: Sequence[DynamicLayer]) -> None:
        """Keep the rows and prompts of the move, add the new ones, and leave `room` columns free."""
        read = [(layer.keys, layer.values) for layer in packed]
        keys, values = (torch.cat(parts, 2) for parts in zip(*read, strict=True)) if read else (None, None)
        self.prompt_keys = self._prompts(self.prompt_keys, keys, move)
        self.prompt_values = self._prompts(self.prompt_values, values, move)
        self.keys = self._responses(self.keys, self.prompt_keys, move, room)
        self.values = self._responses(self.values, self.prompt_values, move, room)
        self.length = move.width

    def _prompts(self, old: Tensor | None, fresh: Tensor | None, move: Move) -> Tensor:
        source, kept, width = old if fresh is None else fresh, len(move.prompts), move.columns.shape[1]
        assert source is not None
        count = kept + len(move.columns)
        new = source.new_empty(count, source.shape[1], width, source.shape[3], dtype=self.dtype)
        if old is not None:
            _end_with(new[:kept], old, move.prompts)
        if fresh is not None:
            new[kept:] = fresh[0][:, move.columns].transpose(0, 1)
        return new

    def _responses(self, old: Tensor | None, prompts: Tensor, move: Move, room: int) -> Tensor:
        kept, width = len(move.rows), move.width
        # Masked values are still multiplied: they must be finite.
        new = prompts.new_zeros(kept + move.new_rows, prompts.shape[1], width + room, prompts.shape[3])
        if old is not None:
            _end_with(new[:kept, :, :width], old[:, :, : self.length], move.rows)
        return new

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length


def _dynamic(layer: object) -> DynamicLayer:
    assert isinstance(layer, DynamicLayer)
    return layer


def _end_with(new: Tensor, old: Tensor, rows: Tensor) -> None:
    """Copy these rows of `old` into `new`, aligned at the last column; each is (rows, heads, columns, head_dim)."""
    width = min(new.shape[2], old.shape[2])
    first = new.shape[2] - width
    new[:, :, :first] = 0
    new[:, :, first:] = old[:, :, old.shape[2] - width :].index_select(0, rows)


class PreallocatedCache(Cache):
    """Preallocated layers for a model. It starts without rows: `compact_and_admit` adds them and makes room.

    `whole`: attention reads every column, also free ones, which keeps shapes constant between compactions. Kernels
    in half precision would copy a slice; in float32 a slice costs nothing and is less to read.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, whole: bool = False) -> None:
        """`dtype`: that of the matrix products, so that no step has to cast; new keys may be in float32."""
        self.preallocated: list[PreallocatedLayer] = []
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the next column, on the device
        self.dtype, self.whole = dtype, whole or dtype != torch.float32
        self.length = 0  # columns in use
        self.room = 0  # columns allocated
        super().__init__(layers=self.preallocated)  # type: ignore[arg-type]  # two names for one list, to know its type

    @property
    def full(self) -> bool:
        """Whether no column is left for another token."""
        return self.length == self.room

    @property
    def seen(self) -> int:
        """Columns that the next token's attention reads."""
        return self.room if self.whole else self.length + 1

    @property
    def prompts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the prompts, layer by layer (prompts, kv_heads, columns, head_dim)."""
        pairs = [(layer.prompt_keys, layer.prompt_values) for layer in self.preallocated]
        return [k for k, _ in pairs if k is not None], [v for _, v in pairs if v is not None]

    def advance(self) -> None:
        """Count the column that every layer has written."""
        self.length += 1
        self.at.add_(1)
        for layer in self.preallocated:
            layer.length = self.length

    def compact_and_admit(self, move: Move) -> None:
        """Apply the move one layer at a time, so that only one tensor exists twice at once."""
        while move.packed and len(self.preallocated) < len(move.packed[0].layers):
            self.preallocated.append(PreallocatedLayer(self.at, self.dtype, self.whole))
        room = min(move.needed, max(HEADROOM, move.width // 4))
        for i, layer in enumerate(self.preallocated):
            layer.compact_and_admit(move, room, [_dynamic(cache.layers[i]) for cache in move.packed])
            for cache in move.packed:
                cache.layers[i] = DynamicLayer()  # free its memory for the next layer
        self.length, self.room = move.width, move.width + room
        self.at.fill_(move.width)


BLOCK = 256  # tokens whose probabilities are summed before the cumulative sum over blocks


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
    ids = logits.argmax(-1) if temperature == 0 else _invert_cdf(probs, uniforms)
    return ids, probs.gather(1, ids[:, None])[:, 0].log()


def _invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token that each uniform number selects: first the block of the vocabulary, then the token in it."""
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
    """Return the first column with sum_{w <= v} mass(w) > u sum_w mass(w), and how far u reaches into its mass.

    masses (rows, columns), uniforms (rows,) float64 in [0, 1]; returns (rows,) int64 and (rows,) float64 in [0, 1].
    """
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, also where rounding took u to 1, so that the column has a mass above 0.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, column).double()
    share = (target - cumulative.gather(1, column) + mass) / mass
    return column[:, 0], share[:, 0].clamp_(0.0, 1.0)


PROMPT_TOKENS = 8192  # read in one pass, whose memory grows with them
COMPACT_BELOW = 0.8  # share of unended sequences below which ended ones are dropped and waiting ones admitted


@dataclass(frozen=True, slots=True)
class SampleUnderWay:
    """One sample that is being decoded."""

    place: int  # in the list that `generate` returns
    number: int  # among the samples of its prompt
    prompt: Prompt

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return its random numbers (count,) in [0, 1), from its prompt's seed and its own number alone."""
        return np.random.default_rng([self.prompt.seed, self.number]).random(count)


@dataclass(slots=True)
class Counts:
    """Counters of one call of `generate`, for metrics and for the tests that bound its cost."""

    steps: int = 0  # forward passes that read one token of each row
    prompts: int = 0  # forward passes that read prompts
    prompt_tokens: int = 0  # read in them
    reallocations: int = 0  # of the cache
    host_reads: int = 0  # times the processor waited for the device


class Batch:
    """The sequences being decoded, one per row; each has its newest token in the newest column of the cache.

    Samples of one prompt are in adjacent rows, so that the prompt is stored, and attended to, once for all of them.
    """

    def __init__(
        self, policy: Policy, sampling: Sampling, kinds: Tensor, compiled: Callable[..., Tensor] | None = None
    ) -> None:
        """`kinds` (vocab,) uint8: whether a token ends a response or may end it (`engine.ENDS`, `engine.MAY`), else 0.

        `compiled` computes the hidden states of a step; None: the model's backbone.
        """
        self.policy, self.sampling, self.kinds = policy, sampling, kinds
        self.compiled = compiled is not None
        self.read = compiled or (lambda **inputs: policy.backbone(**inputs).last_hidden_state)
        self.counts = Counts()
        self.sequences: list[SampleUnderWay] = []
        self.cache = PreallocatedCache(policy.compute_dtype, policy.device, whole=self.compiled)
        # On the host, so that planning does not wait for the device: (rows,) the column of each response's first
        # token, the index of its prompt, and whether it has ended and waits to be dropped; (prompts,) their lengths.
        self.begun, self.asked = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.ended, self.sizes = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        rows = torch.zeros(0, 1, dtype=torch.int64, device=policy.device)
        self.turn = rows  # (rows, 1) tokens drawn so far; of ended rows, the index of the last
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
        """The number of sequences that have not ended."""
        return len(self.ended) - int(self.ended.sum())

    def should_compact(self) -> bool:
        """Whether to drop ended sequences: they cost work in each step, but dropping them costs about one step."""
        return self.cache.full or self.alive < COMPACT_BELOW * len(self.sequences)

    def compact_and_admit(self, admitted: Sequence[Sequence[SampleUnderWay]] = ()) -> None:
        """Drop ended sequences and admit whole groups, after a step, when every row waits for a draw."""
        kept = np.flatnonzero(~self.ended)
        asked = np.unique(self.asked[kept])  # prompts of the kept rows
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
        columns = (ends[:, None] + before).clamp(min=0)  # the mask hides what is before the start of shorter prompts
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
        """Return which rows have which prompt; rows of one prompt are adjacent, any number of them."""
        keys, values = self.cache.prompts
        if self.compiled:  # a copy for each row: rows per prompt would be one more shape to compile for
            asked, own = self._on_device(self.asked), self._on_device(np.arange(len(self.asked)))
            return CachedPrompts([k[asked] for k in keys], [v[asked] for v in values], own, own)
        counts = np.bincount(self.asked)
        most, first = int(counts.max()), np.cumsum(counts) - counts
        place = self.asked * most + np.arange(len(self.asked)) - first[self.asked]
        rows = np.zeros(len(counts) * most, np.int64)
        rows[place] = np.arange(len(place))
        return CachedPrompts(keys, values, self._on_device(rows), self._on_device(place))

    def _move_rows(self, kept: Tensor, new: Sequence[SampleUnderWay], sizes: NDArray[np.int64]) -> None:
        """Keep these rows of the state of each sequence, random numbers included, and add the new sequences' rows."""
        drawn = np.stack([s.uniforms(self.sampling.max_tokens) for s in new]) if new else None
        self.uniforms = self.uniforms[kept]
        if drawn is not None:
            self.uniforms = torch.cat([self.uniforms, on_device(torch.from_numpy(drawn), self.policy.device)])

        def grown(rows: Tensor) -> Tensor:
            return torch.cat([rows[kept], rows.new_zeros(len(new), rows.shape[1])])

        self.turn, self.ids, self.tokens = grown(self.turn), grown(self.ids), grown(self.tokens)
        self.log_probs = grown(self.log_probs)
        self.prompt_lengths = torch.cat([self.prompt_lengths[kept], self._on_device(sizes)[:, None]])

    def _read_prompts(self, prompts: Sequence[Prompt]) -> tuple[list[DynamicCache], Tensor, Tensor]:
        """Read the prompts, packed without padding: return caches, next logits, and the end of each prompt."""
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
        """Draw every row's next token; return the rows that may have ended. `banned` tokens wait for `min_tokens`."""
        sampling, done = self.sampling, self.cache.length - self.begun  # (rows,) tokens each has
        if int(done.min()) < sampling.min_tokens:
            early = self.turn < sampling.min_tokens
            self.logits[:, banned] = self.logits[:, banned].masked_fill(early, float("-inf"))
        # Ended sequences that wait to be dropped draw too, and overwrite their last token.
        ids, log_probs = draw(self.logits, self.uniforms.gather(1, self.turn)[:, 0], sampling.temperature)
        self.ids = ids[:, None]
        self.tokens.scatter_(1, self.turn, self.ids)
        self.log_probs.scatter_(1, self.turn, log_probs[:, None])
        kinds = self._on_host(self.kinds[ids])
        return np.flatnonzero(~self.ended & ((kinds > 0) | (done + 1 >= sampling.max_tokens)))

    def token_ids(self, rows: NDArray[np.int64]) -> list[list[int]]:
        """Return all tokens that these rows have drawn."""
        return self._lists(self.tokens, rows)

    def end(self, rows: NDArray[np.int64]) -> list[list[float]]:
        """Mark these rows as ended; return the log-probabilities of their tokens."""
        self.ended[rows] = True
        return self._lists(self.log_probs, rows)

    def _lists(self, values: Tensor, rows: NDArray[np.int64]) -> list[list[Any]]:
        sizes = self.cache.length - self.begun[rows] + 1
        several = self._on_host(values[self._on_device(rows), : int(sizes.max())])
        return [row[:size].tolist() for row, size in zip(several, sizes.tolist(), strict=True)]

    def step(self) -> None:
        """Run the model on the token just drawn for each row."""
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
        # Ended rows stay within the context: a position beyond it could break the others.
        self.turn = (self.turn + 1).clamp_(max=self.sampling.max_tokens - 1)
        self.logits = self.policy.logits(hidden)
        self.counts.steps += 1

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return on_device(torch.from_numpy(numbers), self.policy.device)

    def _on_host(self, values: Tensor) -> NDArray[Any]:
        self.counts.host_reads += 1
        return values.cpu().numpy()


class UnpaddedBatch(Batch):
    """Sequences that begin together after prompts of one length, so that no padding enters a recurrent state."""

    def compact_and_admit(self, admitted: Sequence[Sequence[SampleUnderWay]] = ()) -> None:
        """Drop ended sequences; admit groups with prompts of one length, once no sequence is left."""
        kept, new = np.flatnonzero(~self.ended), [sequence for group in admitted for sequence in group]
        self.sequences, rows = [self.sequences[i] for i in kept] + new, self._on_device(kept)
        self.begun, self.ended = np.zeros(len(self.sequences), np.int64), np.zeros(len(self.sequences), np.bool_)
        self._move_rows(rows, new, np.zeros(len(new), np.int64))
        if new:  # each prompt is read once
            self.cache.length, self.cache.room = 0, self.sampling.max_tokens  # it only counts columns
            self.own = own = DynamicCache(config=self.policy.model.config)
            self.read = lambda input_ids, **_: self.policy.read(input_ids, own)
            prompts = self._on_device(np.array([group[0].prompt.token_ids for group in admitted]))
            self.logits = self.policy.logits(self.read(input_ids=prompts)[:, -1])
            self.counts.prompts += 1
            self.counts.prompt_tokens += prompts.numel()
            rows = self._on_device(np.repeat(np.arange(len(admitted)), [len(group) for group in admitted]))
        self.own.reorder_cache(rows)  # type: ignore[arg-type]  # any tensor of row numbers
        self.logits = self.logits[rows]


def _rows_of(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Split the prompts, in order, into rows of at most `PROMPT_TOKENS` tokens; a longer one gets its own row."""
    rows, free = list[list[Prompt]](), 0
    for prompt in prompts:
        size = len(prompt.token_ids)
        if not rows or size > free:
            rows.append([])
            free = PROMPT_TOKENS
        rows[-1].append(prompt)
        free -= size
    return rows
