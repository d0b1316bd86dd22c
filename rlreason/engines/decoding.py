"""Decode sequences of any age in one batch: read prompts, draw tokens, drop ended sequences."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlreason.engines.base import Prompt, Sampling
from rlreason.model.attention import CachedPrompts
from rlreason.model.packing import Pair, pack
from rlreason.model.parameters import on_device
from rlreason.model.policy import Policy

HEADROOM = 64  # most free columns after a compaction, or a quarter of those in use where that is more


class PreallocatedCache(Cache):
    """The keys and values of rows being decoded and of their prompts, layer by layer.

    Those of the responses are (rows, kv_heads, columns, head_dim), with `length` columns in use; those of the prompts
    are (prompts, kv_heads, columns, head_dim), every column in use. It starts without rows: `compact_and_admit` adds
    them and makes room.

    `whole`: attention reads every column, also free ones, which the mask hides: this keeps shapes constant between
    compactions. Kernels in half precision would copy a slice; in float32 a slice costs nothing and is less to read.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, whole: bool = False) -> None:
        """`dtype`: that of the matrix products, so that no step has to cast; new keys may be in float32."""
        super().__init__(layers=[])  # the lists below instead
        self.keys, self.values, self.prompt_keys, self.prompt_values = (list[Tensor]() for _ in range(4))
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the next column, on the device
        self.dtype, self.whole = dtype, whole or dtype != torch.float32
        self.length = self.room = 0  # columns in use, and those allocated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use."""
        return self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the newest keys and values (rows, kv_heads, 1, head_dim) in place; return all of them so far."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.at, key_states.to(self.dtype))
        values.index_copy_(2, self.at, value_states.to(self.dtype))
        if self.whole:
            return keys, values
        return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

    def compact_and_admit(
        self, rows: Tensor, new_rows: int, width: int, room: int, prompts: Tensor, columns: Tensor, packed: list[Any]
    ) -> None:
        """Keep these rows and prompts, add new ones, and leave `room` columns free behind the `width` in use.

        `packed`: the model's caches of packed rows of new prompts, whose columns `columns` (new prompts, columns of the
        longest prompt) numbers as one. One layer is moved at a time, so that only one tensor exists twice at once.
        """
        if not self.keys:
            self.keys = [layer.keys[:0, :, :0].to(self.dtype) for layer in packed[0].layers]
            self.values = [layer.values[:0, :, :0].to(self.dtype) for layer in packed[0].layers]
            self.prompt_keys, self.prompt_values = list(self.keys), list(self.values)
        kinds = ("keys", self.prompt_keys, self.keys), ("values", self.prompt_values, self.values)
        for i in range(len(self.keys)):
            for kind, of_prompts, of_responses in kinds:
                of_prompts[i] = _moved(of_prompts[i], prompts, len(columns), columns.shape[1])
                if packed:
                    fresh = torch.cat([getattr(cache.layers[i], kind) for cache in packed], 2)[0]
                    of_prompts[i][len(prompts) :] = fresh[:, columns].transpose(0, 1)
                of_responses[i] = _moved(of_responses[i][:, :, : self.length], rows, new_rows, width, room)
            for cache in packed:
                cache.layers[i] = DynamicLayer()  # free its memory for the next layer
        self.length, self.room = width, width + room
        self.at.fill_(width)


def _moved(old: Tensor, kept: Tensor, added: int, width: int, free: int = 0) -> Tensor:
    """Return these rows of `old` aligned at the last of `width` columns, with `added` rows and `free` columns behind.

    Each is (rows, heads, columns, head_dim). The rest is 0: masked values are still multiplied, so must be finite.
    """
    return F.pad(old.index_select(0, kept), (0, 0, width - old.shape[2], free, 0, 0, 0, added))


BLOCK = 256  # tokens whose probabilities are summed before the cumulative sum over blocks


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at one uniform number per row.

    token = min { v : sum_{w <= v} p(w) > u },  p = softmax(logits / T);  T = 0 takes the most likely token.
    logits (rows, vocab) float32, uniforms (rows,) float64 in [0, 1). Returns token ids (rows,) int64 and their
    natural-log probabilities (rows,) float32 under p (under T = 1 when greedy). No token with p = 0 is drawn. They are
    computed where the random numbers are, and returned where the logits are.

    >>> ids, lp = draw(torch.tensor([[0.0, float("-inf"), 0.0]]), torch.tensor([0.5], dtype=torch.float64), 1.0)
    >>> ids.tolist(), round(lp.item(), 4)
    ([2], -0.6931)
    """
    device, logits = logits.device, logits.to(uniforms.device)
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    probs = logits.softmax(-1)
    vocab = probs.shape[1]
    if temperature == 0:
        ids = logits.argmax(-1)
    elif vocab <= 8 * BLOCK:
        ids = _first_beyond(probs, uniforms)[0]
    else:  # first the block of the vocabulary, then the token in it
        even = vocab - vocab % BLOCK
        blocks = probs[:, :even].unflatten(1, (-1, BLOCK)).sum(-1)
        if even < vocab:
            blocks = torch.cat([blocks, probs[:, even:].sum(-1, keepdim=True)], 1)
        block, within = _first_beyond(blocks, uniforms)
        columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
        inside = probs.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0.0)
        ids = block * BLOCK + _first_beyond(inside, within)[0]
    return ids.to(device), probs.gather(1, ids[:, None])[:, 0].log().to(device)


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


class Batch:
    """The sequences being decoded, one per row; each has its newest token in the newest column of the cache.

    Samples of one prompt are in adjacent rows, so that the prompt is stored, and attended to, once for all of them.
    """

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        n: int,
        may_end: Tensor,
        compiled: Callable[..., Tensor] | None = None,
    ) -> None:
        """`n`: samples of each prompt; `may_end` (vocab,) bool: whether a token ends a response or a stop string.

        `compiled` computes the hidden states of a step; None: the model's backbone.
        """
        self.policy, self.sampling, self.may_end = policy, sampling, may_end
        self.requests, self.n, self.compiled = prompts, n, compiled
        self.full = True  # no column is left for another token
        self.cache = PreallocatedCache(policy.compute_dtype, policy.device, whole=compiled is not None)
        # On the host, so that planning does not wait for the device: (rows,) the place of each sample among all n of
        # all prompts, the tokens that its response has in the cache, the index of its prompt there, and whether it has
        # ended and waits to be dropped.
        self.places = self.lengths = self.asked = np.zeros(0, np.int64)
        self.ended = np.zeros(0, np.bool_)
        # Tokens are drawn in float64, which Apple's GPU does not have.
        self.exact = torch.device("cpu") if policy.device.type == "mps" else policy.device
        # Of each row (max_tokens): all that were drawn, and the random numbers, from the prompt's seed and the sample's
        # number alone.
        self.tokens = torch.zeros(0, sampling.max_tokens, dtype=torch.int64, device=policy.device)
        self.log_probs, self.uniforms = self.tokens.float(), self.tokens.to(self.exact).double()
        self.logits = torch.zeros(0, policy.head.shape[0], device=policy.device)  # (rows, vocab) of the next tokens

    @property
    def alive(self) -> int:
        """The number of sequences that have not ended."""
        return int((~self.ended).sum())

    def should_compact(self) -> bool:
        """Whether to drop ended sequences: they cost work in each step, but dropping them costs about one step."""
        return self.full or self.alive < COMPACT_BELOW * len(self.places)

    def compact_and_admit(self, admitted: Sequence[int] = ()) -> None:
        """Drop ended sequences and admit those of these prompts, when every row waits for a draw or for a step."""
        kept, most, n = np.flatnonzero(~self.ended), self.sampling.max_tokens, self.n
        new = [(i, number) for i in admitted for number in range(n)]
        drawn = [np.random.default_rng([self.requests[i].seed, number]).random(most) for i, number in new]
        self.places = np.append(self.places[kept], np.array([i * n + number for i, number in new], np.int64))
        self.lengths = np.append(self.lengths[kept], np.zeros(len(new), np.int64))
        self.ended = np.zeros(len(self.lengths), np.bool_)
        rows, blank = self._on_device(kept), self.tokens.new_zeros(len(new), most)
        fresh = on_device(torch.from_numpy(np.reshape(drawn, (-1, most))), self.exact)
        self.uniforms = torch.cat([self.uniforms[rows.to(self.exact)], fresh])
        self.turn = self._on_device(self.lengths)[:, None]  # (rows, 1) tokens drawn; of ended rows the last one's index
        self.tokens = torch.cat([self.tokens[rows], blank])
        self.log_probs = torch.cat([self.log_probs[rows], blank.float()])
        self._move_cache(kept, [self.requests[i] for i in admitted], np.repeat(np.arange(len(admitted)), n))
        self.full = False

    def _move_cache(self, kept: NDArray[np.int64], prompts: Sequence[Prompt], groups: NDArray[np.int64]) -> None:
        """Keep these rows of cache and logits, and read the prompts of the new rows; `groups`: the prompt of each."""
        rows, width = self._on_device(kept), int(self.lengths.max())
        still_asked, again = np.unique(self.asked[kept], return_inverse=True)
        asked = self.asked = np.append(again, len(still_asked) + groups)
        sizes = np.array([len(self.requests[place // self.n].token_ids) for place in self.places.tolist()])
        packed, first, ends = self._read_prompts(prompts)
        self.logits = torch.cat([self.logits[rows], first[self._on_device(groups)]])
        before = torch.arange(-int(sizes.max()), 0, device=self.policy.device)
        columns = (ends[:, None] + before).clamp(min=0)  # the mask hides what is before the start of shorter prompts
        needed = max(1, self.sampling.max_tokens - int(self.lengths.min()))
        room = min(needed, max(HEADROOM, width // 4))
        self.cache.compact_and_admit(rows, len(groups), width, room, self._on_device(still_asked), columns, packed)
        keys, values = self.cache.prompt_keys, self.cache.prompt_values
        if self.compiled:  # a copy for each row: rows per prompt would be one more shape to compile for
            copied, asked = self._on_device(asked), np.arange(len(asked))
            keys, values = [k[copied] for k in keys], [v[copied] for v in values]
        counts = np.bincount(asked)  # rows of each prompt: they are adjacent, any number of them
        most, begins = int(counts.max()), np.cumsum(counts) - counts
        place = asked * most + np.arange(len(asked)) - begins[asked]
        of_prompts = np.zeros(len(counts) * most, np.int64)
        of_prompts[place] = np.arange(len(place))
        self.prompts = CachedPrompts(keys, values, self._on_device(of_prompts), self._on_device(place))
        self.prompt_lengths = self._on_device(sizes)[:, None]  # (rows, 1)
        own = torch.arange(self.cache.room, device=self.policy.device)
        written = (own >= width - self.turn) & (own < width)
        attends = torch.cat([before >= -self.prompt_lengths, written], 1)[:, None, None]
        # (rows, 1, 1, prompt columns + columns) 0: attended to, else -inf
        self.mask = torch.zeros(attends.shape, device=self.policy.device).masked_fill_(~attends, float("-inf"))

    def _read_prompts(self, prompts: Sequence[Prompt]) -> tuple[list[DynamicCache], Tensor, Tensor]:
        """Read the prompts, packed without padding: return caches, next logits, and the end of each prompt."""
        rows, size = list[list[Pair]](), 0  # of at most PROMPT_TOKENS tokens; a longer prompt gets its own
        for prompt in prompts:
            size += len(prompt.token_ids)
            if not rows or size > PROMPT_TOKENS:
                rows.append([])
                size = len(prompt.token_ids)
            rows[-1].append((prompt.token_ids, []))
        caches, before = list[DynamicCache](), 0
        logits, ends = [self.logits[:0]], [self.turn[:0, 0]]
        for row in rows:
            batch = pack(row, self.policy.device)
            caches.append(DynamicCache())
            hidden = self.policy.hidden_states(batch, caches[-1])
            bounds = batch.layout.parts.query_bounds[1:].long()
            logits.append(self.policy.logits(hidden[bounds - 1]))
            ends.append(bounds + before)
            before += len(hidden)
        return caches, torch.cat(logits), torch.cat(ends)

    def draw(self, banned: Tensor) -> list[tuple[int, list[int], list[float]]]:
        """Draw every row's next token; return the rows that may have ended, their tokens, and these log-probabilities.

        `banned` tokens wait for `min_tokens`. After the draw the host waits for the device once, and for such rows
        once more.
        """
        sampling = self.sampling
        if int(self.lengths.min()) < sampling.min_tokens:
            early = self.turn < sampling.min_tokens
            self.logits[:, banned] = self.logits[:, banned].masked_fill(early, float("-inf"))
        # Ended sequences that wait to be dropped draw too, and overwrite their last token.
        uniforms = self.uniforms.gather(1, self.turn.to(self.exact))[:, 0]
        ids, log_probs = draw(self.logits, uniforms, sampling.temperature)
        self.tokens.scatter_(1, self.turn, ids[:, None])
        self.log_probs.scatter_(1, self.turn, log_probs[:, None])
        may_end = self.may_end[ids].cpu().numpy()
        rows = np.flatnonzero(~self.ended & (may_end | (self.lengths + 1 >= sampling.max_tokens)))
        if not len(rows):
            return []
        sizes, at = self.lengths[rows] + 1, self._on_device(rows)
        of_rows = [numbers[at, : int(sizes.max())] for numbers in (self.tokens, self.log_probs)]
        tokens, scores = torch.stack([numbers.to(self.exact).double() for numbers in of_rows]).cpu().numpy()
        ended = zip(rows.tolist(), tokens.astype(np.int64), scores, sizes, strict=True)
        return [(row, ids[:size].tolist(), of_ids[:size].tolist()) for row, ids, of_ids, size in ended]

    def step(self) -> None:
        """Run the model on the token just drawn for each row."""
        hidden = self._hidden_states(self.tokens.gather(1, self.turn))
        self.lengths = self.lengths + 1  # not in place: a tensor on the processor may share its memory
        # Ended rows stay within the context: a position beyond it could break the others.
        self.turn = (self.turn + 1).clamp_(max=self.sampling.max_tokens - 1)
        self.logits = self.policy.logits(hidden)

    def _hidden_states(self, ids: Tensor) -> Tensor:
        """Read a token (rows, 1) of each row into the cache; return the last hidden states (rows, width)."""
        cache, before = self.cache, self.mask.shape[-1] - self.cache.room  # columns of the prompts
        self.mask[..., before + cache.length] = 0.0
        read = self.compiled or (lambda **inputs: self.policy.backbone(**inputs).last_hidden_state)
        hidden = read(
            input_ids=ids,
            position_ids=self.prompt_lengths + self.turn,
            attention_mask=self.mask if cache.whole else self.mask[..., : before + cache.length + 1],
            prompts=self.prompts,
            past_key_values=cache,
            use_cache=True,
        )
        cache.length += 1
        cache.at.add_(1)
        self.full = cache.length == cache.room
        return hidden[:, 0]

    def _on_device(self, numbers: NDArray[Any]) -> Tensor:
        return on_device(torch.from_numpy(numbers), self.policy.device)


class UnpaddedBatch(Batch):
    """Sequences that begin together after prompts of one length, so that no padding enters a recurrent state.

    Groups are admitted once no sequence is left.
    """

    def _move_cache(self, kept: NDArray[np.int64], prompts: Sequence[Prompt], groups: NDArray[np.int64]) -> None:
        rows = self._on_device(kept)
        if prompts:  # each is read once
            self.own = DynamicCache(config=self.policy.model.config)
            asked = self._on_device(np.array([prompt.token_ids for prompt in prompts]))
            self.logits = self.policy.logits(self.policy.read(asked, self.own)[:, -1])
            rows = self._on_device(groups)
        self.own.reorder_cache(rows)  # type: ignore[arg-type]  # any tensor of row numbers
        self.logits = self.logits[rows]

    def _hidden_states(self, ids: Tensor) -> Tensor:
        return self.policy.read(ids, self.own)[:, 0]
