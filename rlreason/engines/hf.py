"""The embedded engine: samples from the live weights of the policy with transformers alone.

It runs wherever torch runs and has no copy of the weights that could be stale. Prompts are read once
per group; rows that have ended make room for those that wait; the random numbers of a sample depend on
its prompt's seed and its place in the group only, so neither the batch nor the machine's load changes them.
It must not know rewards, answers or steps.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.rows import Batch, Row
from rlreason.policy import Policy
from rlreason.types import FinishReason, Response


class HFEngine:
    """Samples with the policy's own module; `load_weights` only counts, because there is nothing to copy."""

    def __init__(self, policy: Policy, max_rows: int = 256) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self.weight_version = 0
        self.sync_metrics: dict[str, float] = {}  # there is nothing to hand over
        self._stop_tokens: dict[tuple[str, ...], frozenset[int] | None] = {}

    def load_weights(self, policy: Policy) -> None:
        if policy is not self.policy:
            raise ValueError("the embedded engine samples from the policy it was made with; make a new engine")
        self.weight_version += 1

    def close(self) -> None:
        """Nothing to stop: the engine owns no process and no memory between calls."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        responses: dict[int, Response] = {}

        def collect(row: Row) -> None:
            responses[row.place] = response = self._response(row, sampling)
            if finished is not None:
                finished(row.place, response)

        def begin(place: int, prompt: Prompt) -> Row:
            return Row(place, prompt, np.random.default_rng([prompt.seed, place % n]).random(sampling.max_tokens))

        groups = [[begin(i * n + j, prompt) for j in range(n)] for i, prompt in enumerate(prompts)]
        # One region for all steps, so that weights are cast once. Inference mode has less overhead, but there autocast
        # would not keep what it has cast.
        casts = self.policy.compute_dtype != torch.float32
        with torch.no_grad() if casts else torch.inference_mode(), self.policy.autocast():
            self._sample(groups, sampling, collect)
        return [responses[place] for place in range(len(prompts) * n)]

    def _sample(self, groups: list[list[Row]], sampling: Sampling, collect: Callable[[Row], None]) -> None:
        """Decode up to `max_rows` rows side by side; waiting groups join as others end."""
        ended = self._ending_rule(sampling)
        banned = torch.tensor(sorted(self.policy.end_ids), device=self.policy.device)
        # Rows of about one length should run together, because attention reaches over the longest of them.
        waiting = deque(sorted(groups, key=lambda group: len(group[0].prompt.token_ids)))
        batch, alive = Batch(self.policy, sampling.max_tokens), 0
        while waiting or alive:
            if waiting and batch.worn(alive):
                batch.renew(self._joining(waiting, alive))
            ids, log_probs = batch.draw(sampling, banned)
            for row, token, log_prob in zip(batch.rows, ids.tolist(), log_probs.tolist(), strict=True):
                if row.take(token, log_prob, ended):
                    collect(row)
            alive = sum(row.finish_reason is None for row in batch.rows)
            if alive:
                if not waiting and batch.worn(alive):
                    batch.renew()  # before the step, which ended rows then do not share
                batch.step()

    def _joining(self, waiting: deque[list[Row]], alive: int) -> list[list[Row]]:
        """The groups there is room for beside the rows alive; a group larger than `max_rows` runs alone."""
        joining: list[list[Row]] = []
        while waiting and (alive == 0 or alive + len(waiting[0]) <= self.max_rows):
            joining.append(waiting.popleft())
            alive += len(joining[-1])
        return joining

    def _ending_rule(self, sampling: Sampling) -> Callable[[Row], FinishReason | None]:
        """Whether a row ends with its newest token. Text is decoded only after a token that can end a stop string."""
        end_ids = self.policy.end_ids
        if sampling.stop not in self._stop_tokens:
            self._stop_tokens[sampling.stop] = closing_tokens(self.policy, sampling.stop)
        closing = self._stop_tokens[sampling.stop]

        def ended(row: Row) -> FinishReason | None:
            token = row.token_ids[-1]
            if token in end_ids:
                return "stop"
            first_look = len(row.token_ids) == sampling.min_tokens  # a stop string may stand before
            may_close = sampling.stop and (closing is None or token in closing or first_look)
            if may_close and len(row.token_ids) >= sampling.min_tokens:
                text = self._text(row)
                if any(stop in text for stop in sampling.stop):
                    return "stop"
            return "length" if len(row.token_ids) == sampling.max_tokens else None

        return ended

    def _text(self, row: Row) -> str:
        decode = self.policy.tokenizer.decode
        return str(decode(row.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _response(self, row: Row, sampling: Sampling) -> Response:
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
