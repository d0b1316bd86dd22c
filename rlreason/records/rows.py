"""Convert graded responses to rows of a file and to plain values, and back; the log of responses, the counters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlreason.errors import ConfigError
from rlreason.records.files import UNFINISHED, each_line, line_of, written
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import append_line
from rlreason.runtime.streams import print_stderr
from rlreason.types import Collected, Grade, Problem, Response, Sample

Row = dict[str, Any]
#: The fields needed to grade a row again, to show it to a person, and to learn from it.
TO_REGRADE = ("response", "gold", "outcome")
TO_SHOW = (*TO_REGRADE, "problem_id", "question", "format_reward", "path", "length", "finish_reason")
TO_LEARN = (
    "problem_id", "response", "reward", "format_reward", "answer_reward", "outcome", "path", "finish_reason",
    "weight_version", "prompt_ids", "token_ids", "log_probs",
)  # fmt: skip


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these rows, one per line; a number that is not finite becomes null."""
    with written(path) as file:
        file.writelines(map(line_of, rows))


def response_row(step: int, s: Sample, problem: Problem) -> Row:
    """Return a row with which a response can be read, graded again, and used in any loss without sampling."""
    return {
        "step": step,
        "problem_id": s.group,
        "question": problem.question,
        "gold": problem.answer,
        "response": s.response.text,
        **grade_columns(s.grade),
        "advantage": round(s.advantage, 6),
        "kept": s.has_loss,
        "length": len(s.response.token_ids),
        "entropy": None if s.entropy is None else round(s.entropy, 5),
        "facts": problem.facts,
        **({} if s.prompt_grade is None else {"prompt_reward": grade_columns(s.prompt_grade)}),
        "finish_reason": s.response.finish_reason,
        "weight_version": s.response.weight_version,
        "prompt_ids": s.response.prompt_ids,
        "token_ids": s.response.token_ids,
        "log_probs": [round(lp, 5) for lp in s.response.log_probs],
    }


def grade_columns(grade: Grade) -> Row:
    """Return the fields of a row with its grade."""
    return {
        "reward": grade.reward,
        "format_reward": grade.format,
        "answer_reward": grade.answer,
        "outcome": grade.outcome,
        "path": grade.path,
    }


def grade_of(row: Row) -> Grade:
    """Return the grade of a row."""
    return Grade(row["format_reward"], row["answer_reward"], row["reward"], row["outcome"], row["path"])


def sample_of(row: Row) -> Sample:
    """Return the sample of a row, its response and grade. The row needs the fields of `TO_LEARN`."""
    names = ("problem_id", "prompt_ids", "token_ids", "log_probs", "finish_reason", "weight_version")
    response = Response(text=row["response"], **{name: row[name] for name in names})
    by_prompt = grade_of(row["prompt_reward"]) if row.get("prompt_reward") else None
    return Sample(response, grade_of(row), by_prompt, log_probs=row.get("trainer_log_probs"))


def plain_collected(collected: Collected) -> dict[str, Any]:
    """Convert a step's samples and batches to plain values: each sample once, referred to by its place.

    JSON keeps every float exactly.
    """
    every = {id(s): s for s in [*collected.samples, *(s for batch in collected.batches for s in batch)]}
    places = {key: place for place, key in enumerate(every)}
    return {
        "pool": msgspec.to_builtins(list(every.values())),
        "samples": [places[id(s)] for s in collected.samples],
        "batches": [[places[id(s)] for s in batch] for batch in collected.batches],
        "metrics": collected.metrics,
        "notices": collected.notices,
        "restart": collected.restart,
    }


def collected_from(plain: Mapping[str, Any]) -> Collected:
    """Invert `plain_collected`."""
    rest = dict(plain)
    pool = msgspec.convert(rest.pop("pool"), list[Sample])
    samples = [pool[place] for place in rest.pop("samples")]
    return Collected(samples, [[pool[place] for place in batch] for batch in rest.pop("batches")], **rest)


class ResponseLog:
    """The log of a job's responses: those of an interrupted part, by problem, and new ones as they end."""

    def __init__(self, folder: Path, identity: str, problems: Sequence[Problem], n: int) -> None:
        """`identity` names the model and the problems: a log of others is refused with a `ConfigError`.

        Problems that lack some of their `n` responses are sampled again.
        """
        self.path = folder / UNFINISHED
        self._problems = {p.id: p for p in problems}
        lines = [row for _, row in each_line(self.path, print_stderr)] if self.path.exists() else []
        if lines and lines[0].get("identity") != identity:
            raise ConfigError(
                f"{self.path} holds responses of another model or to other problems than these settings now give "
                "(a file behind them has changed): choose another hydra.run.dir"
            )
        rows = {(row["problem_id"], row["sample"]): row for row in lines[1:]}
        complete = [p.id for p in problems if all((p.id, j) in rows for j in range(n))]
        self.samples = {id: [sample_of(rows[id, j]) for j in range(n)] for id in complete}
        write_rows(self.path, [{"identity": identity}, *(rows[id, j] for id in complete for j in range(n))])

    def add(self, number: int, sample: Sample) -> None:
        """Append a response; `number` is its index among the responses to its problem."""
        row = response_row(0, sample, self._problems[sample.group])
        append_line(self.path, line_of(row | {"sample": number, "log_probs": sample.response.log_probs}))


@dataclass
class Counters:
    """Counts since the run began, earlier interrupted parts included.

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
    # Of the last step: seconds ("step") and "tokens"; of the last evaluation: seconds per "problem"; and the seconds of
    # all steps up to the end of the last one ("until").
    pace: dict[str, float] = field(default_factory=dict)

    def sampled(self, samples: Sequence[Sample]) -> None:
        """Count a rollout step that has begun with these samples; none in SFT."""
        self.rollout_step += 1
        self.tokens_generated += sum(len(s.response.token_ids) for s in samples)

    def learned(self, update: Mapping[str, float]) -> None:
        """Count an optimizer update with these metrics; one without loss does not count."""
        self.train_step += not update.get("train/empty_updates")
        self.tokens_trained += int(update.get("train/tokens", 0))

    def step_ended(self, tokens: int) -> None:
        """Note the time and tokens of a recorded step, from which the next one is estimated."""
        spent = self._spent()
        self.pace |= {"step": spent - self.pace.get("until", 0.0), "tokens": tokens, "until": spent}

    def _spent(self) -> float:
        """Return the seconds of steps and checkpoints."""
        return sum(value for name, value in self.clock.phases().items() if name not in ("setup", "eval"))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the pace and the clock, for a checkpoint."""
        return self.row() | {"pace": self.pace, "clock": self.clock.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from this state."""
        for name in ("rollout_step", "train_step", "eval_step", "tokens_generated", "tokens_trained"):
            setattr(self, name, state[name.replace("tokens_", "tokens/")])
        self.clock.load_state_dict(state["clock"])
        self.pace = {"until": self._spent()} | state["pace"]

    def row(self) -> dict[str, float]:
        """Return the counters under the names above."""
        return {
            "rollout_step": self.rollout_step,
            "train_step": self.train_step,
            "eval_step": self.eval_step,
            "tokens/generated": self.tokens_generated,
            "tokens/trained": self.tokens_trained,
            "time/active": self.clock.active(),
            "time/total": self.clock.total(),
        }
