"""How far a run has come: the counters that stand in every row of `metrics.jsonl`, each with one meaning everywhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlreason.config.leaves import below
from rlreason.types import Sample


@dataclass
class Counters:
    """Everything counted since the run began, an interrupted part before it included.

        rollout_step      steps of the algorithm begun: a rollout batch in GRPO and EI, a batch of traces in SFT
        train_step        optimizer updates, those left out because their gradient was not finite included
        eval_step         evaluations done
        tokens/generated  response tokens sampled to learn from
        tokens/trained    response tokens that carried loss, once for every update that they were in
        time/active       seconds of sampling and learning: no set-up, no evaluation
        time/total        seconds of everything

    >>> Counters(rollout_step=2, train_step=8).row()["train_step"]
    8
    """

    rollout_step: int = 0
    train_step: int = 0
    eval_step: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    seconds_active: float = 0.0
    seconds_total: float = 0.0  # before `began`
    began: float | None = None  # on the monotonic clock
    active_since: float | None = None  # None: set-up or evaluation
    newest: dict[str, float] = field(default_factory=dict)  # metrics of the newest update
    # Seconds of the newest "step", its "tokens", and seconds of the newest evaluation per "problem", as far as known.
    pace: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Time counts from here on."""
        self.began = time.monotonic()

    def resume(self) -> None:
        """Sampling or learning begins."""
        if self.active_since is None:
            self.active_since = time.monotonic()

    def pause(self) -> None:
        """Sampling and learning rest, as during an evaluation."""
        if self.active_since is not None:
            self.seconds_active += time.monotonic() - self.active_since
            self.active_since = None

    def sampled(self, samples: Sequence[Sample]) -> None:
        """A rollout step has begun with these samples; none in SFT."""
        self.rollout_step += 1
        self.tokens_generated += sum(len(s.response.token_ids) for s in samples)

    def learned(self, update: Mapping[str, float]) -> None:
        """An optimizer update has these metrics; one in which nothing carried loss is none."""
        self.newest = dict(update)
        self.train_step += not update.get("train/empty_updates")
        self.tokens_trained += int(update.get("train/tokens", 0))

    def state(self) -> dict[str, float]:
        """The counters as they stand now, with the metrics of the newest update and the pace."""
        pace = {f"pace/{name}": value for name, value in self.pace.items()}
        return self.row() | {f"newest/{name}": value for name, value in self.newest.items()} | pace

    def put(self, state: Mapping[str, float]) -> None:
        """Go on counting from here, now."""
        self.rollout_step, self.train_step = int(state["rollout_step"]), int(state["train_step"])
        self.eval_step = int(state["eval_step"])
        self.tokens_generated, self.tokens_trained = int(state["tokens/generated"]), int(state["tokens/trained"])
        self.seconds_active, self.active_since = state["time/active"], None
        self.seconds_total, self.began = state["time/total"], time.monotonic()
        self.newest, self.pace = below(state, "newest/"), below(state, "pace/")

    def row(self) -> dict[str, float]:
        """The counters as they stand now, under the names above."""
        now = time.monotonic()
        active = self.seconds_active + (now - self.active_since if self.active_since is not None else 0.0)
        return {
            "rollout_step": self.rollout_step,
            "train_step": self.train_step,
            "eval_step": self.eval_step,
            "tokens/generated": self.tokens_generated,
            "tokens/trained": self.tokens_trained,
            "time/active": active,
            "time/total": self.seconds_total + (now - self.began if self.began is not None else 0.0),
        }
