"""The embedded engine: samples from the live weights of the policy with transformers alone.

It runs wherever torch runs and has no copy of the weights that could be stale. Prompts are read once
per group; rows that have ended are dropped; the random numbers of a sample depend on its prompt's
seed and its place in the group only, so neither the batch nor the machine's load changes them.
It must not know rewards, answers or steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.slab import select_rows, slab_cache
from rlreason.policy import Policy
from rlreason.types import FinishReason, Response

COMPACT_BELOW = 0.8  # drop ended rows when fewer than this share is alive; copying the cache costs about one step


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
class _Row:
    """One sample under way."""

    place: int  # in the list that `generate` returns
    prompt: Prompt
    uniforms: np.ndarray  # (max_tokens,) float64
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token: int, log_prob: float, ended: Callable[["_Row"], FinishReason | None]) -> bool:
        """Add a sampled token, unless the row has ended and only waits to be dropped; whether it has ended just now."""
        if self.finish_reason is not None:
            return False
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.finish_reason = ended(self)
        return self.finish_reason is not None


class HFEngine:
    """Samples with the policy's own module; `load_weights` only counts, because there is nothing to copy."""

    def __init__(self, policy: Policy, max_rows: int = 256) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self.weight_version = 0
        self._stop_tokens: dict[tuple[str, ...], frozenset[int] | None] = {}

    def load_weights(self, policy: Policy) -> None:
        if policy is not self.policy:
            raise ValueError("the embedded engine samples from the policy it was made with; make a new engine")
        self.weight_version += 1

    def close(self) -> None:
        """Nothing to stop: the engine owns no process and no memory between calls."""

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        responses: dict[int, Response] = {}

        def collect(place: int, response: Response) -> None:
            responses[place] = response
            if finished is not None:
                finished(place, response)

        rows = [
            _Row(i * n + j, prompt, np.random.default_rng([prompt.seed, j]).random(sampling.max_tokens))
            for i, prompt in enumerate(prompts)
            for j in range(n)
        ]
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        per_batch = max(1, self.max_rows // n)
        for start in range(0, len(by_length), per_batch):
            chosen = by_length[start : start + per_batch]
            members = [row for i in chosen for row in rows[i * n : (i + 1) * n]]
            self._sample([prompts[i] for i in chosen], members, sampling, collect)
        return [responses[place] for place in range(len(rows))]

    def _sample(self, prompts: Sequence[Prompt], rows: list[_Row], sampling: Sampling, collect: Finished) -> None:
        """One batch of rows, n for each prompt in turn, decoded side by side until the last has ended."""
        device = self.policy.device
        ended, banned = self._ending_rule(sampling), torch.tensor(sorted(self.policy.end_ids), device=device)
        lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
        width, cache, live = int(lengths.max()), slab_cache(), list(rows)
        with self.policy.autocast():  # one region for all steps: weights are cast once
            logits = self._read_prompts(prompts, lengths, cache)
            # From here on there is one row per sample: each prompt was read once and is now repeated.
            repeat = torch.arange(len(prompts), device=device).repeat_interleave(len(rows) // len(prompts))
            select_rows(cache, repeat)
            logits, lengths = logits[repeat], lengths[repeat]
            seen = torch.ones(len(rows), width + sampling.max_tokens, dtype=torch.bool, device=device)
            seen[:, :width] = torch.arange(width, device=device) < lengths[:, None]  # a short prompt's padding is not
            for t in range(sampling.max_tokens):
                if t < sampling.min_tokens:
                    logits[:, banned] = float("-inf")
                uniforms = torch.from_numpy(np.array([row.uniforms[t] for row in live])).to(device)
                ids, log_probs = draw(logits, uniforms, sampling.temperature)
                for row, token, log_prob in zip(live, ids.tolist(), log_probs.tolist(), strict=True):
                    if row.take(token, log_prob, ended):
                        collect(row.place, self._response(row, sampling))
                kept = [i for i, row in enumerate(live) if row.finish_reason is None]
                if not kept:
                    break
                if len(kept) < COMPACT_BELOW * len(live):
                    index = torch.tensor(kept, device=device)
                    select_rows(cache, index)
                    ids, lengths, seen, live = ids[index], lengths[index], seen[index], [live[i] for i in kept]
                hidden = self.policy.backbone(
                    input_ids=ids[:, None],
                    position_ids=(lengths + t)[:, None],
                    attention_mask=seen[:, None, None, : width + t + 1],
                    past_key_values=cache,
                    use_cache=True,
                ).last_hidden_state[:, 0]
                logits = self.policy.logits(hidden)

    def _read_prompts(self, prompts: Sequence[Prompt], lengths: Tensor, cache: Cache) -> Tensor:
        """Fill the cache with the prompts (padded on the right, hidden later) and return the first logits."""
        device = self.policy.device
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
        read = self.policy.backbone(input_ids=ids.to(device), past_key_values=cache, use_cache=True)
        return self.policy.logits(read.last_hidden_state[torch.arange(len(prompts), device=device), lengths - 1])

    def _ending_rule(self, sampling: Sampling) -> Callable[[_Row], FinishReason | None]:
        """Whether a row ends with its newest token. Text is decoded only after a token that can end a stop string."""
        end_ids = self.policy.end_ids
        if sampling.stop not in self._stop_tokens:
            self._stop_tokens[sampling.stop] = closing_tokens(self.policy, sampling.stop)
        closing = self._stop_tokens[sampling.stop]

        def ended(row: _Row) -> FinishReason | None:
            token = row.token_ids[-1]
            if token in end_ids:
                return "stop"
            may_close = sampling.stop and (closing is None or token in closing)
            if may_close and len(row.token_ids) >= sampling.min_tokens:
                text = self._text(row)
                if any(stop in text for stop in sampling.stop):
                    return "stop"
            return "length" if len(row.token_ids) == sampling.max_tokens else None

        return ended

    def _text(self, row: _Row) -> str:
        decode = self.policy.tokenizer.decode
        return str(decode(row.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _response(self, row: _Row, sampling: Sampling) -> Response:
        assert row.finish_reason is not None
        return Response(
            problem_id=row.prompt.problem_id,
            prompt_ids=row.prompt.token_ids,
            token_ids=row.token_ids,
            log_probs=row.log_probs,
            text=cut_after(self._text(row), sampling.stop),
            finish_reason=row.finish_reason,
            weight_version=self.weight_version,
        )


def cut_after(text: str, stop: Sequence[str]) -> str:
    """The text up to and including the first stop string; the ids keep whatever else the last token held.

    >>> cut_after("4 </answer> and", ["</answer>"])
    '4 </answer>'
    """
    ends = [text.index(s) + len(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


def closing_tokens(policy: Policy, stop: Sequence[str]) -> frozenset[int] | None:
    """Tokens that can complete a stop string: those whose text holds one of its last characters.

    None means any token may: vocabularies spell white space otherwise, and a last character outside ASCII can be
    split over several tokens.
    """
    last = {s[-1] for s in stop}
    if not all(c.isascii() and c.isprintable() and not c.isspace() for c in last):
        return None
    vocabulary = policy.tokenizer.get_vocab()
    return frozenset(i for piece, i in vocabulary.items() if any(c in piece for c in last))
