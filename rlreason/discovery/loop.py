"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the server, the start program and its score
    each turn    messages by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A resumed run walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.asking import Asker
from rlreason.discovery.client import Client
from rlreason.discovery.journal import Event, Journal, Messages, Spending
from rlreason.discovery.log import FIRST, Log, Turn, without_measurements
from rlreason.discovery.problem import DiscoveryProblem, feedback, filled, problem_named
from rlreason.discovery.report import write_report
from rlreason.discovery.sandbox.contained import Limits, protections, protections_text
from rlreason.discovery.score import score_program
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter


@dataclass(slots=True)
class Conversation:
    """A conversation with the model: the replies that it continued from, and the message after each."""

    number: int
    system: str | None
    first: str
    exchanges: list[tuple[Turn, str, str]] = field(default_factory=list)  # reply, kind and text of what followed
    without_progress: int = 0  # turns since its best program

    def add(self, turn: Turn, kind: str, text: str) -> None:
        """Continue the conversation from this reply, with this message after it."""
        better = turn.credit > max((one.credit for one, _, _ in self.exchanges), default=0)
        self.without_progress = 0 if better else self.without_progress + 1
        self.exchanges.append((turn, kind, text))

    def ask(self, number: int, samples: int, history: int) -> tuple[Messages, list[Turn]]:
        """Return the next messages: the first one, the best reply so far, the last `history`; and turns to fill.

        With history=0 it continues from the best reply only; if none was valid yet, from the last.
        """
        places = set(range(len(self.exchanges))[-history:] if history else ())
        scores = [turn.credit for turn, _, _ in self.exchanges]
        if any(scores):
            places.add(scores.index(max(scores)))
        elif scores:
            places.add(len(scores) - 1)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.first})
        shown = [self.exchanges[place] for place in sorted(places)]
        for turn, _, text in shown:
            messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": text}]
        asked: dict[str, Any] = {"conversation": self.number, "sees": [turn.id for turn, _, _ in shown]}
        asked |= {"prompt": messages[-1]["content"], "prompt_kind": shown[-1][1] if shown else FIRST}
        return messages, [Turn(turn=number, sample=k, **asked) for k in range(samples)]


def chosen_of(turns: Sequence[Turn]) -> Turn | None:
    """Return the reply to continue from: of the best set, else with points, else with a program; None without replies.

    On a tie it is the first.
    """
    answered = [turn for turn in turns if turn.content]
    if not answered:
        return None
    return max(answered, key=lambda t: (t.credit, bool(t.result and t.result["raw_points"]), t.program is not None))


def discover(run: DiscoverConfig, records: RunWriter, console: Console) -> float:
    """Run `algorithm=discover`, leave everything in the folder of `records`, return the best score."""
    records.clock.begin()
    discovery = Discovery(run, records, console)
    try:
        discovery.take_turns()
    finally:
        discovery.stop.set()
    return discovery.conclude()


class Discovery:
    """A run in progress: its parts, and its log so far."""

    def __init__(self, run: DiscoverConfig, records: RunWriter, console: Console) -> None:
        """Set the run up: its start is recorded in the journal, or read from there if it is resumed."""
        self.run, self.records, self.console = run, records, console
        self.problem = problem_named(run.problem)
        self.journal = journal = Journal(records.folder / files.CALLS, console.say)
        self.stop = threading.Event()  # ends running programs
        score = run.score
        self.limits = Limits(score.timeout_s, score.memory_mb, check_timeout_s=score.check_timeout_s, cpus=score.cpus)
        self.spending = Spending(run)
        client = Client(run.client, journal.begin.get("model", ""))
        self.begin = journal.begin or self._first_event(client)
        if self.begin["problem_hash"] != self.problem.hash:
            raise ConfigError(
                f"problem={self.problem.name}: its files have changed since this run began, and scores would not "
                "compare: put them back, or choose another hydra.run.dir"
            )
        journal.write("part")
        self.log = self._first_log()
        self.source = self.begin["start"]["source"]  # of the best program
        self.earlier_turns = journal.last_turn  # the last of these may not be complete
        self.asker = Asker(run, client, journal, self.spending, self.score)

    def score(self, source: str) -> dict[str, Any]:
        """Score a program, until the run stops or its hours are spent."""

        def stopped() -> bool:
            return self.stop.is_set() or not self.spending.seconds_left(self.journal.seconds)

        return score_program(source.encode("utf-8", "replace"), self.problem, self.limits, stopped)

    def _first_event(self, client: Client) -> Event:
        """Record the start of the run, with its model's name and its start program scored."""
        run, problem = self.run, self.problem
        templates, source = problem.templates(run.prompts), start_source(run, problem)
        with self.console.wait("scoring the start program"):
            result = self.score(source)
        client.model = client.model or client.only_model()
        values = {"timeout_s": f"{run.score.timeout_s:g}", "memory_mb": run.score.memory_mb, "unit": problem.unit}
        values |= {"starter": source.strip(), "score": result["score"]}
        values["hints"] = f"\n{problem.hints.strip()}\n" if run.prompts.hints else ""
        self.journal.write(
            "begin",
            model=client.model,
            problem=problem.name,
            problem_hash=problem.hash,
            templates=templates,
            first=filled(templates[FIRST], values),
            start={"program": run.start or problem.starter, "source": source, "result": result},
        )
        return self.journal.begin

    def _first_log(self) -> Log:
        """Return the log before the first turn; docs/discovery.md explains the fields."""
        run, start, client, result = self.run, self.begin["start"], self.run.client, self.begin["start"]["result"]
        best = {"program_sha256": result["program_sha256"], "score": result["score"]}
        return Log(
            problem=run.problem,
            title=self.problem.title,
            unit=self.problem.unit,
            strategy=run.strategy,
            model=self.begin["model"],
            seed=run.seed,
            settings={
                "replies": run.side_by_side,
                "temperature": client.temperature,
                "thinking": client.thinking,
                "max_tokens": client.max_tokens,
                "extra": client.extra or {},
                "retries": client.retries,
                "hints": run.prompts.hints,
                "history": run.history if run.converses else 0,
                "restart_after": run.restart_after,
                "score": {name: getattr(run.score, name) for name in ("timeout_s", "memory_mb", "check_timeout_s")},
                "budget": asdict(run.budget),
            },
            system=client.system,
            first_prompt=self.begin["first"],
            start={"program": start["program"], **best, "result": without_measurements(result)},
            turns=[],
            spent={},
            best={"score": best["score"], "turn": "start", "program_sha256": best["program_sha256"]},
            record=list(self.problem.record),
        )

    def take_turns(self) -> None:
        """Ask, score and answer turn by turn until a budget is spent."""
        run, say, number, history = self.run, self.console.say, 0, self.run.history if self.run.converses else 0
        say(f"problem    {self.problem.title}: begins with {self.log.best['score']} {self.problem.unit}")
        say(f"asks       {self.begin['model']}, {run.strategy}; at most {run.most_spent}")
        say(f"held back  by {protections_text(protections(self.limits))}")
        say(f"records    {self.records.folder}; interrupted? resume={self.records.folder} goes on, and repeats no call")
        if not self.earlier_turns:
            self.write_documents()
        conversation = Conversation(1, run.client.system, self.begin["first"])
        while not self.asker.ended:
            number += 1
            messages, turns = conversation.ask(number, run.side_by_side, history)
            with self.records.clock.phase("discover"), self.console.wait(f"turn {number}: asking and scoring"):
                turns = self.asker.ask(messages, turns)
            if not turns:
                break
            for turn in turns:
                if turn.credit > self.log.best["score"] and turn.program is not None:
                    self.log.best = {"score": turn.credit, "turn": turn.id, "program_sha256": turn.program_sha256}
                    self.source, turn.improved = turn.program, True
                turn.best_so_far = self.log.best["score"]
            self.log.turns += turns
            if run.converses and (chosen := chosen_of(turns)) is not None:
                chosen.chosen = True
                result = self.journal.scores[chosen.id] if chosen.result else None
                kind, text = feedback(self.begin["templates"], result, self.log.best["score"], self.problem.unit)
                conversation.add(chosen, kind, text)
            self.write_turn(number, turns)
            if run.restart_after is not None and conversation.without_progress >= run.restart_after:
                conversation = Conversation(conversation.number + 1, run.client.system, self.begin["first"])

    def write_turn(self, number: int, turns: list[Turn]) -> None:
        """Write a row of metrics; of a turn that is not repeated also the log, the program and a line to the user."""
        row = {
            "discover/turn": number,
            "discover/score": max(turn.credit for turn in turns),
            "discover/best": self.log.best["score"],
            "discover/valid": sum(turn.is_valid for turn in turns) / len(turns),
            "discover/calls": self.spending.calls,
            "discover/tokens": self.spending.tokens,
            "discover/cost": self.spending.cost,
        }
        self.records.metrics(Counters(rollout_step=number, clock=self.records.clock).row() | row)
        if number < self.earlier_turns:  # the log on the disk has more than this
            return
        self.write_documents()
        best, outcomes = self.log.best["score"], ", ".join(map(outcome_of, turns))
        self.console.say(f"turn {number:<5} {self.spending.calls:>4} calls  best {best:<6} {outcomes}")
        for turn in turns:
            if turn.result and (alarm := turn.result.get("alarm")):
                self.console.say(f"! ALARM, no score for reply {turn.id}: {alarm}")

    def write_documents(self) -> None:
        """Write the current `program.py` and `conversation_log.json`, each as a whole."""
        self.records.document(files.PROGRAM, self.source)
        names = ("calls", "prompt_tokens", "completion_tokens")
        self.log.spent = {name: getattr(self.spending, name) for name in names} | {"cost": round(self.spending.cost, 9)}
        self.records.document(files.CONVERSATION, self.log.text())

    def conclude(self) -> float:
        """Write the last log, the report and the summary."""
        log, ended, folder = self.log, self.asker.ended, self.records.folder
        is_finished = ended.startswith("budget.calls")
        log.ended = ended
        self.write_documents()
        report, _ = write_report([folder], folder)
        self.records.summary(
            {
                "status": "finished" if is_finished else "budget",
                "reason": "" if is_finished else ended,
                "score": log.best["score"],
                "score_before": log.start["score"],
                "problem": self.problem.name,
                "strategy": log.strategy,
                "model": log.model,
                "calls": self.spending.calls,
                "tokens": self.spending.tokens,
                "cost": self.spending.cost,
                "program_sha256": log.best["program_sha256"],
                **time_summary(self.records.clock),
                "seconds": round(self.journal.seconds, 1),
            }
        )
        program, before = folder / files.PROGRAM, log.start["score"]
        self.console.say(f"\n{ended}: the best program has {log.best['score']} {log.unit}, the first had {before}")
        self.console.say(f"program    {program}; score it again: rlreason score {program}")
        self.console.say(f"report     {report}")
        return float(log.best["score"])


def outcome_of(turn: Turn) -> str:
    """Return a turn's score, or what went wrong, in a word or two."""
    if turn.result is None:
        return turn.calls[-1].outcome
    return str(turn.credit if turn.is_valid else turn.result["error_kind"])


def refuse_unready(run: DiscoverConfig) -> None:
    """Raise `ConfigError` if a run could not begin: no address, or no such problem, prompt or start program."""
    problem = problem_named(run.problem)
    problem.templates(run.prompts)
    start_source(run, problem)
    Client(run.client)


def start_source(run: DiscoverConfig, problem: DiscoveryProblem) -> str:
    """Return the program that the model begins with."""
    path = problem.folder / problem.starter if run.start is None else Path(run.start).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"start={run.start} cannot be read ({error}): give a file of Python") from error
