"""Log-probabilities and entropies of given responses under a model, without gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlreason.model.packing import Pair
from rlreason.model.policy import Policy

Pairs = Sequence[Pair]  # (prompt ids, response ids)


class TokenScores(NamedTuple):
    """One number for each token of a response."""

    log_probs: list[float]  # natural logarithms
    entropies: list[float]  # nats, of the distribution that the token was drawn from


@dataclass(frozen=True, slots=True)
class LogProbScorer:
    """Scores responses under a policy, with the weights that it has at the time of the call."""

    policy: Policy
    token_budget: int  # of one pass: prompts and responses of several pairs are packed up to so many tokens
    temperature: float = 1.0  # above 0

    def __call__(self, pairs: Pairs) -> list[TokenScores]:
        """Log-probabilities and entropies of the response tokens of each (prompt ids, response ids) pair, in order."""
        return self._score(pairs, want_entropy=True)

    def log_probs(self, pairs: Pairs) -> list[list[float]]:
        """The log-probabilities alone, which cost less."""
        return [scores.log_probs for scores in self._score(pairs, want_entropy=False)]

    def _score(self, pairs: Pairs, want_entropy: bool) -> list[TokenScores]:
        if self.policy.deal is not None:  # trained on several ranks, which score together
            return self.policy.deal(self, pairs, want_entropy)
        rows = self.policy.divide(pairs, self.token_budget)
        found = scored_rows(self.policy, pairs, rows, self.temperature, want_entropy)
        return [found[i] for i in range(len(pairs))]


@torch.no_grad()
def scored_rows(
    policy: Policy, pairs: Pairs, rows: Sequence[Sequence[int]], temperature: float, want_entropy: bool
) -> dict[int, TokenScores]:
    """The scores of some of the pairs, by number, in passes of `rows` of them."""
    found = dict[int, TokenScores]()
    for numbers in rows:
        batch = policy.pack([pairs[i] for i in numbers])
        log_probs, entropy = policy.log_probs(batch, temperature, want_entropy)
        sizes = batch.lengths.tolist()
        entropies = entropy.split(sizes) if want_entropy else [entropy] * len(numbers)  # not wanted: empty
        for i, of_tokens, of_choices in zip(numbers, log_probs.split(sizes), entropies, strict=True):
            found[i] = TokenScores(of_tokens.tolist(), of_choices.tolist())
    return found
