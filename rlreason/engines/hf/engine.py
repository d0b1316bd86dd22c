"""The in-process engine: sample from the policy's own weights with a preallocated KV cache."""

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlreason.engines.base import Finished, Prompt, Sampling, Stops
from rlreason.engines.hf.decoding import PROMPT_TOKENS, Batch, Counts, SampleUnderWay, UnpaddedBatch
from rlreason.model.policy import Policy
from rlreason.runtime.files import alive
from rlreason.types import FinishReason, Response

#: The effect of a token on its response: none (0), may complete a stop string, ends it.
MAY, ENDS = 1, 2


class HFEngine:
    """Sample with the policy's own module; `load_weights` only counts, because there is nothing to copy."""

    def __init__(
        self, policy: Policy, max_rows: int = 256, compile: bool = False, say: Callable[[str], None] = print
    ) -> None:
        """`max_rows`: most samples decoded at once; `compile`: run decoding steps through torch.compile."""
        self.policy, self.max_rows = policy, max_rows
        # Rows and columns are symbolic, so that neither a compaction nor a new length recompiles.
        self.compiled = torch.compile(self._hidden_states, dynamic=True) if compile and policy.packs else None
        if compile and not policy.packs:
            say("! rollout.compile=true has no effect: this model samples by its own forward pass and its own cache")
        self.weight_version = self.drawn = 0
        self.counts = Counts()  # of the newest `generate`

    def _hidden_states(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self.policy.backbone(**inputs).last_hidden_state
        return hidden

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Count a weight sync; nothing is copied. `ValueError` for another policy."""
        if policy is not self.policy:
            raise ValueError("the in-process engine samples from the policy it was made with; make a new engine")
        self.weight_version += 1
        return {}

    def close(self) -> None:
        """Nothing to stop: the engine owns no process and no memory between calls."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; see `engines.base.Engine`."""
        responses: dict[int, Response] = {}
        self.drawn, self.counts = 0, Counts()
        stops = Stops(self.policy.tokenizer, sampling.stop, sampling.min_tokens, sampling.tags)

        def collect(place: int, response: Response) -> None:
            responses[place] = response
            if finished is not None:
                finished(place, response)

        # One region for all steps, so that weights are cast once. Inference mode has less overhead, but in it autocast
        # does not cache cast weights.
        casts = self.policy.compute_dtype != torch.float32
        with torch.no_grad() if casts or self.compiled else torch.inference_mode(), self.policy.autocast():
            self._sample(prompts, sampling, n, stops, collect)
        return [responses[place] for place in range(len(prompts) * n)]

    def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, n: int, stops: Stops, collect: Finished) -> None:
        """Decode up to `max_rows` sequences at a time; waiting groups are admitted as others end."""
        vocab = self.policy.head.shape[0]
        end_ids = frozenset(i for i in self.policy.end_ids | sampling.end_ids if i < vocab)  # a config may name others
        banned = torch.tensor(sorted(end_ids), device=self.policy.device)
        kinds = token_kinds(vocab, end_ids, stops).to(self.policy.device)
        # Decode sequences of similar length together, because attention covers the longest of them.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids)))
        batch = (Batch if self.policy.packs else UnpaddedBatch)(self.policy, sampling, kinds, self.compiled)
        self.counts = batch.counts
        while waiting or batch.alive:
            if waiting and batch.should_compact():
                admitted = self._admitted(waiting, n, batch.alive, prompts)
                batch.compact_and_admit(
                    [[SampleUnderWay(i * n + j, j, prompts[i]) for j in range(n)] for i in admitted]
                )
            rows = batch.draw(banned)
            self.drawn += batch.alive
            alive()
            if len(rows):
                self._end(batch, rows, end_ids, stops, collect)
            if batch.alive:
                if not waiting and batch.should_compact():
                    batch.compact_and_admit()  # before the step, so that it skips ended sequences
                batch.step()

    def _end(
        self, batch: Batch, rows: NDArray[np.int64], end_ids: AbstractSet[int], stops: Stops, collect: Finished
    ) -> None:
        """Collect those of these rows that have ended. Text is decoded only where a token can end a stop string."""
        ended: list[tuple[int, list[int], FinishReason, int]] = []
        for row, token_ids in zip(rows.tolist(), batch.token_ids(rows), strict=True):
            token, overhang = token_ids[-1], None
            if token in end_ids:
                overhang = 0
            elif stops.may_close(token):
                overhang = stops.overhang(token_ids)
            if overhang is not None:
                ended.append((row, token_ids, "stop", overhang))
            elif len(token_ids) == batch.sampling.max_tokens:
                ended.append((row, token_ids, "length", 0))
        if not ended:
            return
        log_probs = batch.end(np.array([row for row, *_ in ended]))
        for (row, token_ids, reason, overhang), theirs in zip(ended, log_probs, strict=True):
            sequence = batch.sequences[row]
            response = Response(
                problem_id=sequence.prompt.problem_id,
                prompt_ids=sequence.prompt.token_ids,
                token_ids=token_ids,
                log_probs=theirs,
                text=stops.text(token_ids, overhang),
                finish_reason=reason,
                weight_version=self.weight_version,
            )
            collect(sequence.place, response)

    def _admitted(self, waiting: deque[int], n: int, alive: int, prompts: Sequence[Prompt]) -> list[int]:
        """Take the groups of n that fit next to the `alive` rows, a larger one alone.

        Without packing: only groups of one prompt length, once no row is alive, as many as are read in one pass.
        """
        admitted, size = list[int](), 0
        while waiting and (alive == 0 or alive + n <= self.max_rows):
            full = (len(admitted) + 1) * size > PROMPT_TOKENS
            if not self.policy.packs and alive and (full or size != len(prompts[waiting[0]].token_ids)):
                break
            size = len(prompts[waiting[0]].token_ids)
            admitted.append(waiting.popleft())
            alive += n
        return admitted


def token_kinds(vocab: int, end_ids: AbstractSet[int], stops: Stops) -> Tensor:
    """Return (vocab,) uint8: the effect of each token on its response: ENDS, MAY, or 0 for none."""
    kinds = torch.zeros(vocab, dtype=torch.uint8)
    if stops.stop:
        kinds[slice(None) if stops.closing is None else sorted(i for i in stops.closing if i < vocab)] = MAY
    kinds[sorted(end_ids)] = ENDS
    return kinds
