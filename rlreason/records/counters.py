"""How far a run has come: the counters that stand in every row of `metrics.jsonl`, each with one meaning everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.config.leaves import below
from rlreason.runtime.clock import Clock
from rlreason.types import Sample


@dataclass
class Counters:
    """Everything counted since the run began, an interrupted part before it included.

        rollout_step      steps of the algorithm begun: a rollout batch in GRPO and EI, a batch of traces in SFT
        train_step        optimizer updates, those left out because their gradient was not finite included
        eval_step         evaluations done
        tokens/generated  response tokens sampled to learn from
        tokens/trained    response tokens that carried loss, once for every update that they were in
        time/active       seconds of sampling and learning: no set-up, no evaluation, no checkpoint
        time/total        seconds of everything, in all parts of the run

    >>> Counters(rollout_step=2, train_step=8).row()["train_step"]
    8
    """

    rollout_step: int = 0
    train_step: int = 0
    eval_step: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    clock: Clock = field(default_factory=Clock)
    newest: dict[str, float] = field(default_factory=dict)  # metrics of the newest update
    # Seconds of the newest "step", its "tokens", seconds of the newest evaluation per "problem", as far as known; and
    # how many seconds all steps had taken at the end of the newest ("until").
    pace: dict[str, float] = field(default_factory=dict)

    def sampled(self, samples: Sequence[Sample]) -> None:
        """A rollout step has begun with these samples; none in SFT."""
        self.rollout_step += 1
        self.tokens_generated += sum(len(s.response.token_ids) for s in samples)

    def learned(self, update: Mapping[str, float]) -> None:
        """An optimizer update has these metrics; one in which nothing carried loss is none."""
        self.newest = dict(update)
        self.train_step += not update.get("train/empty_updates")
        self.tokens_trained += int(update.get("train/tokens", 0))

    def step_ended(self, tokens: int) -> None:
        """A step is recorded, which has sampled so many tokens: the next one is expected to be like it."""
        spent = self._spent()
        self.pace |= {"step": spent - self.pace.get("until", 0.0), "tokens": tokens, "until": spent}

    def _spent(self) -> float:
        """Seconds of steps and checkpoints."""
        return sum(value for name, value in self.clock.phases().items() if name not in ("setup", "eval"))

    def state(self) -> dict[str, Any]:
        """The counters as they stand now, with the metrics of the newest update, the pace and the clock."""
        pace = {f"pace/{name}": value for name, value in self.pace.items()}
        newest = {f"newest/{name}": value for name, value in self.newest.items()}
        return self.row() | newest | pace | {"clock": self.clock.state()}

    def put(self, state: Mapping[str, Any]) -> None:
        """Go on counting from here, now."""
        self.rollout_step, self.train_step = int(state["rollout_step"]), int(state["train_step"])
        self.eval_step = int(state["eval_step"])
        self.tokens_generated, self.tokens_trained = int(state["tokens/generated"]), int(state["tokens/trained"])
        self.clock.put(state["clock"])
        self.newest, self.pace = below(state, "newest/"), below(state, "pace/")
        self.pace.setdefault("until", self._spent())

    def row(self) -> dict[str, float]:
        """The counters as they stand now, under the names above."""
        return {
            "rollout_step": self.rollout_step,
            "train_step": self.train_step,
            "eval_step": self.eval_step,
            "tokens/generated": self.tokens_generated,
            "tokens/trained": self.tokens_trained,
            "time/active": self.clock.active(),
            "time/total": self.clock.total(),
        }
