"""What an evaluation keeps in memory of a response that is on the disk: numbers and its text, no tokens."""

import math
from dataclasses import dataclass

from rlreason.types import Grade, Sample


@dataclass(frozen=True, slots=True)
class Judged:
    """The figures of a scored sample, under the names that it has them by (`types.Counted`)."""

    group: str
    grade: Grade
    prompt_grade: Grade | None
    text: str
    length: int
    truncated: bool
    tokens_key: int
    entropy: float | None
    nll: float
    n_log_probs: int
    log_prob: float  # of the whole response under the model, in nats; 0 where it was not scored

    @property
    def mean_log_prob(self) -> float:
        """Per token; 0 of no tokens."""
        return self.log_prob / max(self.length, 1)


def judged(s: Sample) -> Judged:
    """What is kept of a sample."""
    return Judged(
        group=s.group,
        grade=s.grade,
        prompt_grade=s.prompt_grade,
        text=s.text,
        length=s.length,
        truncated=s.truncated,
        tokens_key=s.tokens_key,
        entropy=s.entropy,
        nll=s.nll,
        n_log_probs=s.n_log_probs,
        log_prob=math.fsum(s.log_probs or []),
    )
