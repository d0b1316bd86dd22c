"""The in-process engine: sample from the policy's own weights with a preallocated KV cache."""

from collections import deque
from collections.abc import Sequence

import torch

from rlreason.engines.base import Finished, Prompt, Sampling, Stops, closing_tokens
from rlreason.engines.decoding import PROMPT_TOKENS, Batch, UnpaddedBatch
from rlreason.model.policy import Policy
from rlreason.runtime.files import alive
from rlreason.types import Response


class HFEngine:
    """Sample with the policy's own module; `load_weights` only counts, because there is nothing to copy."""

    def __init__(self, policy: Policy, max_rows: int = 256, compile: bool = False) -> None:
        """`max_rows`: most samples decoded at once; `compile`: run decoding steps through torch.compile.

        A model that samples by its own forward pass and its own cache is not compiled.
        """
        self.policy, self.max_rows = policy, max_rows
        self.compiled = None
        if compile and policy.packs:  # rows and columns are symbolic: neither a compaction nor a new length recompiles
            self.compiled = torch.compile(lambda **inputs: policy.backbone(**inputs).last_hidden_state, dynamic=True)
        self.weight_version = self.drawn = 0

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
        """Sample n responses to each prompt; see `engines.base.Engine`.

        Up to `max_rows` sequences are decoded at a time; waiting groups are admitted as others end.
        """
        policy, vocab, responses = self.policy, range(len(self.policy.head)), dict[int, Response]()
        stops = Stops(policy.tokenizer, sampling)
        end_ids = sorted((policy.end_ids | sampling.end_ids).intersection(vocab))  # a config may name others
        closing = closing_tokens(policy.tokenizer.get_vocab(), sampling.stop).intersection(vocab)
        may_end = torch.zeros(len(vocab), dtype=torch.bool)
        may_end[[*end_ids, *closing]] = True
        banned = torch.tensor(end_ids, device=policy.device)
        # Decode sequences of similar length together, because attention covers the longest of them.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids)))
        kind, self.drawn = Batch if policy.packs else UnpaddedBatch, 0
        # One region for all steps, so that weights are cast once. Inference mode has less overhead, but in it autocast
        # does not cache cast weights.
        infers = policy.compute_dtype == torch.float32 and not self.compiled
        with torch.inference_mode() if infers else torch.no_grad(), policy.autocast():
            batch = kind(policy, sampling, prompts, n, may_end.to(policy.device), self.compiled)
            while waiting or batch.alive:
                if waiting and batch.should_compact():
                    # The groups of n that fit next to the rows that are alive, a larger one alone. Without packing only
                    # groups of one prompt length, once no row is alive, as many as are read in one pass.
                    admitted, size, rows = list[int](), 0, batch.alive
                    while waiting and (rows == 0 or rows + n <= self.max_rows):
                        before, size = size, len(prompts[waiting[0]].token_ids)
                        full = (len(admitted) + 1) * before > PROMPT_TOKENS
                        if not policy.packs and rows and (full or size != before):
                            break
                        admitted.append(waiting.popleft())
                        rows += n
                    batch.compact_and_admit(admitted)
                self.drawn += batch.alive
                alive()
                for row, token_ids, log_probs in batch.draw(banned):
                    overhang = 0 if token_ids[-1] in end_ids else stops.overhang(token_ids)
                    if overhang is None and len(token_ids) < sampling.max_tokens:
                        continue
                    batch.ended[row] = True
                    place = int(batch.places[row])
                    prompt = prompts[place // n]
                    responses[place] = Response(
                        problem_id=prompt.problem_id,
                        prompt_ids=prompt.token_ids,
                        token_ids=token_ids,
                        log_probs=log_probs,
                        text=stops.text(token_ids, overhang),
                        finish_reason="length" if overhang is None else "stop",
                        weight_version=self.weight_version,
                    )
                    if finished is not None:
                        finished(place, responses[place])
                if batch.alive:
                    if not waiting and batch.should_compact():
                        batch.compact_and_admit()  # before the step, so that it skips ended sequences
                    batch.step()
        return [responses[place] for place in range(len(prompts) * n)]
