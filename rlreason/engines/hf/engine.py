"""The in-process engine: samples from the live weights of the policy with transformers alone.

It runs wherever torch runs and has no copy of the weights that could be stale. Prompts are read once per group;
sequences that have ended are replaced by those that wait (continuous batching); the random numbers of a sample depend
on its prompt's seed and its place in the group only, so neither the batch nor the machine's load changes them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.hf.decoding import Batch, SequenceState
from rlreason.engines.stops import Stops
from rlreason.model.policy import Policy
from rlreason.runtime import lock
from rlreason.types import FinishReason, Response


class HFEngine:
    """Samples with the policy's own module; `load_weights` only counts, because there is nothing to copy."""

    def __init__(self, policy: Policy, max_rows: int = 256) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self.weight_version = self.drawn = 0
        self._stops: dict[tuple[tuple[str, ...], int], Stops] = {}

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Count a weight sync; nothing is copied, so there are no metrics. `ValueError` for another policy."""
        if policy is not self.policy:
            raise ValueError("the in-process engine samples from the policy it was made with; make a new engine")
        self.weight_version += 1
        return {}

    def close(self) -> None:
        """Nothing to stop: the engine owns no process and no memory between calls."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """n samples of each prompt; see `engines.base.Engine`."""
        responses: dict[int, Response] = {}
        self.drawn = 0
        stops = self._stops_of(sampling)

        def collect(sequence: SequenceState) -> None:
            responses[sequence.place] = response = self._response(sequence, stops)
            if finished is not None:
                finished(sequence.place, response)

        # One region for all steps, so that weights are cast once. Inference mode has less overhead, but there autocast
        # would not keep what it has cast.
        casts = self.policy.compute_dtype != torch.float32
        with torch.no_grad() if casts else torch.inference_mode(), self.policy.autocast():
            self._sample(prompts, sampling, n, stops, collect)
        return [responses[place] for place in range(len(prompts) * n)]

    def _sample(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        n: int,
        stops: Stops,
        collect: Callable[[SequenceState], None],
    ) -> None:
        """Decode up to `max_rows` sequences at a time; waiting groups are admitted as others end."""
        end_ids = self.policy.end_ids | sampling.end_ids
        ended = ending_rule(end_ids, sampling, stops)
        banned = torch.tensor(sorted(end_ids), device=self.policy.device)
        # Sequences of about one length should run together, because attention reaches over the longest of them.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids)))

        def begin(i: int) -> list[SequenceState]:
            return [SequenceState(i * n + j, j, prompts[i]) for j in range(n)]

        batch, alive = Batch(self.policy, sampling.max_tokens), 0
        while waiting or alive:
            if waiting and batch.should_compact(alive):
                batch.compact_and_admit([begin(i) for i in self._admitted(waiting, n, alive)])
            ids, log_probs = batch.draw(sampling, banned)
            self.drawn += batch.alive()
            lock.alive()
            for sequence, token, log_prob in zip(batch.sequences, ids.tolist(), log_probs.tolist(), strict=True):
                if sequence.take(token, log_prob, ended):
                    collect(sequence)
            alive = batch.alive()
            if alive:
                if not waiting and batch.should_compact(alive):
                    batch.compact_and_admit()  # before the step, so that ended sequences take no part in it
                batch.step()

    def _admitted(self, waiting: deque[int], n: int, alive: int) -> list[int]:
        """The groups of n that fit in with those alive; a group larger than `max_rows` runs alone."""
        admitted: list[int] = []
        while waiting and (alive == 0 or alive + n <= self.max_rows):
            admitted.append(waiting.popleft())
            alive += n
        return admitted

    def _stops_of(self, sampling: Sampling) -> Stops:
        """Kept from call to call: a large vocabulary is searched for tokens that can close a stop string once."""
        key = (sampling.stop, sampling.min_tokens)
        if key not in self._stops:
            self._stops[key] = Stops(self.policy.tokenizer, *key)
        return self._stops[key]

    def _response(self, sequence: SequenceState, stops: Stops) -> Response:
        assert sequence.finish_reason is not None
        return Response(
            problem_id=sequence.prompt.problem_id,
            prompt_ids=sequence.prompt.token_ids,
            token_ids=sequence.token_ids,
            log_probs=sequence.log_probs,
            text=stops.text(sequence.token_ids, sequence.overhang),
            finish_reason=sequence.finish_reason,
            weight_version=self.weight_version,
        )


def ending_rule(
    end_ids: AbstractSet[int], sampling: Sampling, stops: Stops
) -> Callable[[SequenceState], FinishReason | None]:
    """Whether a sequence ends with its newest token. Text is decoded only after a token that can end a stop string."""

    def ended(sequence: SequenceState) -> FinishReason | None:
        token = sequence.token_ids[-1]
        if token in end_ids:
            return "stop"
        overhang = stops.overhang(sequence.token_ids) if stops.may_close(token) else None
        if overhang is not None:
            sequence.overhang = overhang
            return "stop"
        return "length" if len(sequence.token_ids) == sampling.max_tokens else None

    return ended
