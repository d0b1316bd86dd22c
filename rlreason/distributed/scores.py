"""Scoring of responses, dealt over ranks: every rank scores its share, and all get all of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlreason.distributed.ranks import Ranks
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer, Pairs, TokenScores, scored_rows


@dataclass(frozen=True, slots=True)
class DealtScores:
    """Scores under the policies that every rank has, by name: `policy`, and `reference` where there is one."""

    ranks: Ranks
    policies: Mapping[str, Policy]
    in_step: bool  # every rank has to go through as many passes as the others

    def of(self, name: str, scorer: LogProbScorer, pairs: Pairs, want_entropy: bool) -> list[TokenScores]:
        """As the scorer would score alone."""
        return self.score(name, pairs, scorer.token_budget, scorer.temperature, want_entropy) if pairs else []

    @torch.no_grad()
    def score(
        self, name: str, pairs: Pairs, token_budget: int, temperature: float, want_entropy: bool
    ) -> list[TokenScores]:
        """By all ranks; called by the others at the word of rank 0."""
        with self.ranks.together("score", name, pairs, token_budget, temperature, want_entropy):
            policy, rank, world = self.policies[name], self.ranks.rank, self.ranks.world
            rows = policy.divide(pairs, token_budget)
            mine = rows[rank::world]
            found = scored_rows(policy, pairs, mine, temperature, want_entropy)
            if self.in_step and len(mine) < -(-len(rows) // world):
                scored_rows(policy, pairs, [rows[0][:1]], temperature, False)
            parts = self.ranks.gathered(found)
        everything = {place: scores for part in parts for place, scores in part.items()}
        return [everything[i] for i in range(len(pairs))]
