"""The records that parts pass to each other: problems, responses, grades, samples, the batches of a step.

Plain records without tensors, so that every package can import them. A later change of a record makes a new one
(`dataclasses.replace`).
"""

from dataclasses import dataclass, field
from typing import Literal

#: How a response ended: the model stopped (end token or stop string), or the token limit cut it.
FinishReason = Literal["stop", "length"]

#: The grader's result. `timeout`, `refused` and `error` earn no reward but are never plain `wrong`:
#: they are counted separately, because they are failures of the grader and not of the model.
Outcome = Literal["correct", "wrong", "unformatted", "timeout", "refused", "error"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its reference answer. `id` is unique within its data set and identifies groups."""

    id: str
    question: str
    answer: str  # empty where the data has none: then there is nothing to grade
    solution: str | None = None  # a worked solution, where the data has one
    prompt: str | None = None  # the whole prompt, where the data has it; else a template is filled with the question
    response: str | None = None  # a whole response to imitate, where the data has it
    facts: dict[str, str] = field(default_factory=dict, compare=False)  # from the data: level, subject ...
    claim: tuple[str, str] | None = None  # a wrong solution and its answer, which a trace is written from instead


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled continuation of one prompt, as the engine produced it.

    `token_ids` are exactly the sampled tokens (end token included when it was sampled), and `log_probs[t]` is the
    natural-log probability of `token_ids[t]` under the actual sampling distribution, with temperature and the ban on
    early end tokens.
    """

    problem_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    text: str  # for grading and reading only; training uses the ids
    finish_reason: FinishReason
    weight_version: int = 0  # how many weight syncs the engine had received when it sampled this

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one response. `path` names the rule that decided (docs/runs.md lists them), for audits.

    `milliseconds` of work, and whether it was `remembered` from an equal pair, are ignored in comparisons.
    """

    format: float
    answer: float
    reward: float
    outcome: Outcome
    path: str = ""
    milliseconds: float | None = field(default=None, compare=False)
    remembered: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """A response with its grade, and the results of algorithm and trainer on it.

    All log-probabilities are natural logarithms, one for each response token; None: not computed.
    """

    response: Response
    grade: Grade
    prompt_grade: Grade | None = None  # by the prompt's reward, where an evaluation counts by another
    advantage: float = 0.0
    has_loss: bool = True  # a sample without loss still counted in its group's baseline
    log_probs: list[float] | None = None  # of the trainer, under the weights that sampled
    entropy: float | None = None  # nats, of the trainer's distribution, mean over the response
    old_log_probs: list[float] | None = None  # of the behaviour policy, for ratios; None: the policy that is updated
    reference_log_probs: list[float] | None = None  # of the reference model of a KL term

    @property
    def group(self) -> str:
        """The id of its problem; the responses to one problem form a group."""
        return self.response.problem_id

    @property
    def text(self) -> str:
        """What was answered."""
        return self.response.text

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.response.token_ids)

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it."""
        return self.response.truncated

    @property
    def tokens_key(self) -> int:
        """Equal for equal tokens."""
        return hash(tuple(self.response.token_ids))

    @property
    def nll(self) -> float:
        """-log p of the whole response under the engine, in nats; 0 where the engine gave none."""
        return -sum(self.response.log_probs)

    @property
    def n_log_probs(self) -> int:
        """Tokens that `nll` is a sum over."""
        return len(self.response.log_probs)


@dataclass(frozen=True, slots=True)
class SampleFigures:
    """The figures of a scored sample that metrics need, without its tokens, which would fill the memory."""

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
        """Return the mean per token; 0 without tokens."""
        return self.log_prob / max(self.length, 1)


ScoredResponse = Sample | SampleFigures


@dataclass(frozen=True, slots=True)
class Collected:
    """The samples of one step of an algorithm, and the batches to learn from."""

    samples: list[Sample]  # all samples of this step, for the records and the monitors
    batches: list[list[Sample]]  # one optimizer step each, in order; empty when there is nothing to learn
    metrics: dict[str, float]
    notices: dict[str, str] = field(default_factory=dict)  # name -> a warning, in a sentence
    restart: bool = False  # train from the run's start weights


@dataclass(frozen=True, slots=True)
class Update:
    """One completed optimizer step."""

    metrics: dict[str, float]  # over all response tokens of the batch
    entropies: list[float | None]  # nats, sample by sample: mean over the response under the weights before the step
