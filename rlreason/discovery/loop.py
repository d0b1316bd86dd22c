"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the endpoint, the start program and its score
    each turn    a question by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A resumed run walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import json
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.asking import Asker
from rlreason.discovery.client import Endpoint, only_model
from rlreason.discovery.journal import Begin, Journal, PartEvent, Spending, Start
from rlreason.discovery.report import write_run_report
from rlreason.discovery.sandbox.contained import Limits, protections, protections_text
from rlreason.discovery.score import refuse_other_systems, score_program
from rlreason.discovery.turns import (
    Conversation,
    DiscoveryProblem,
    Question,
    Reply,
    chosen_of,
    feedback,
    first_prompt,
    problem_named,
    templates_of,
    without_measurements,
)
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.text import duration


@dataclass
class BestProgram:
    """The best program so far, and its origin."""

    score: int
    source: str
    sha256: str
    turn: str = "start"  # or "TURN.SAMPLE"


def discover(run: DiscoverConfig, records: RunWriter, console: Console) -> float:
    """Run `algorithm=discover`, leave everything in the folder of `records`, return the best score."""
    refuse_other_systems()
    records.clock.begin()
    discovery = Discovery(run, records, console)
    try:
        discovery.announce()
        if not discovery.earlier_turns:
            discovery.write_documents()
        discovery.take_turns()
    finally:
        discovery.stop.set()
    return discovery.conclude()


class Discovery:
    """A run in progress: its parts, and all replies so far."""

    def __init__(self, run: DiscoverConfig, records: RunWriter, console: Console) -> None:
        """Set the run up: its start is recorded in the journal, or read from there if it is resumed."""
        self.run, self.records, self.console = run, records, console
        self.problem = problem_named(run.problem)
        self.journal = journal = Journal(records.folder / files.CALLS, console.say)
        self.stop = threading.Event()  # ends running programs
        score = run.score
        self.limits = Limits(score.timeout_s, score.memory_mb, check_timeout_s=score.check_timeout_s, cpus=score.cpus)
        endpoint = endpoint_of(run, journal.begin.model if journal.begin else None)
        if journal.begin is None:
            endpoint = self._begin(endpoint)
        elif journal.begin.problem_hash != self.problem.hash:
            raise ConfigError(
                f"problem={self.problem.name}: its files have changed since this run began, and scores would not "
                "compare: put them back, or choose another hydra.run.dir"
            )
        journal.write(PartEvent())
        assert journal.begin is not None
        self.begin, start = journal.begin, journal.begin.start
        self.best = BestProgram(start.result["score"], start.source, start.result["program_sha256"])
        self.score_on_disk = max([self.best.score, *(result["score"] for result in journal.scores.values())])
        self.earlier_turns = journal.last_turn  # the last of these may not be complete
        self.replies: list[Reply] = []
        self.spending = Spending(run.budget, run.client.prompt_price, run.client.completion_price)
        self.asker = Asker(run, endpoint, journal, self.spending, self.score, self.save_if_better)

    def score(self, source: str) -> dict[str, Any]:
        """Score a program, until the run stops or its hours are spent."""
        hours = self.run.budget.hours

        def stopped() -> bool:
            return self.stop.is_set() or (hours is not None and self.journal.seconds >= hours * 3600)

        return score_program(source.encode("utf-8", "replace"), self.problem, self.limits, stopped).as_dict()

    def _begin(self, endpoint: Endpoint) -> Endpoint:
        """Record the start of the run, with its start program scored; return the endpoint with its model."""
        run, problem = self.run, self.problem
        templates, source = templates_of(run.prompts, problem), start_source(run, problem)
        with self.console.wait("scoring the start program"):
            result = self.score(source)
        if not endpoint.model:
            endpoint = only_model(endpoint)
        more = {"hints": run.prompts.hints, "timeout_s": f"{run.score.timeout_s:g}", "memory_mb": run.score.memory_mb}
        self.journal.write(
            Begin(
                model=endpoint.model,
                problem=problem.name,
                problem_hash=problem.hash,
                templates=templates,
                first=first_prompt(templates["first"], problem, source, result, more),
                start=Start(run.start or problem.starter, source, result),
            )
        )
        return endpoint

    def announce(self) -> None:
        """Print where requests go, and how programs are contained."""
        run, say, limits, folder = self.run, self.console.say, self.limits, self.records.folder
        several = f", {run.side_by_side} replies at a time" if run.side_by_side > 1 else ""
        active = protections_text(protections(limits), briefly=True)
        say(f"problem    {self.problem.title}: begins with {self.best.score} {self.problem.unit}")
        say(f"asks       {self.asker.endpoint.model}, {run.strategy}{several}; at most {run.most_spent}")
        say(f"programs   {duration(limits.timeout_s)} and {limits.memory_mb} MB each; held back by {active}")
        if self.earlier_turns:
            calls = len(self.journal.asks)
            say(f"goes on    in turn {self.earlier_turns}, after {calls} calls, none of which is repeated")
        say(f"records    {folder}; interrupted? resume={folder} goes on, and repeats no call")

    def take_turns(self) -> None:
        """Ask, score and answer turn by turn until a budget is spent."""
        run, first = self.run, self.begin.first
        turn, conversation = 0, Conversation(1, run.client.system, first)
        while not self.asker.ended:
            turn += 1
            replies = self.ask(conversation.ask(turn, run.history if run.converses else 0))
            if not replies:
                break
            if run.converses and (chosen := chosen_of(replies)) is not None:
                chosen.chosen = True
                kind, text = feedback(self.begin.templates, chosen.result, self.best.score, self.problem.unit)
                conversation.add(chosen, kind, text)
            self.write_turn(turn, replies)
            if run.restart_after is not None and conversation.without_progress >= run.restart_after:
                conversation = Conversation(conversation.number + 1, run.client.system, first)

    def ask(self, question: Question) -> list[Reply]:
        """Return the replies to a question, after taking them in."""
        waiting = f"turn {question.turn}: asking and scoring"
        with self.records.clock.phase("discover"), self.console.wait(waiting):
            try:
                replies = self.asker.replies(question, self.run.side_by_side)
            except BaseException:
                if question.turn >= self.earlier_turns:  # every call that was made stands in the log
                    self.take_in([reply for reply in self.asker.current if reply.calls])
                    with suppress(OSError):
                        self.write_documents()
                raise
        self.take_in(replies)
        return replies

    def take_in(self, replies: list[Reply]) -> None:
        """Add replies to those of the run, and update the best program."""
        for reply in replies:
            if reply.score > self.best.score and reply.program is not None and reply.result is not None:
                self.best = BestProgram(reply.score, reply.program, reply.result["program_sha256"], reply.id)
                reply.improved = True
            reply.best_so_far = self.best.score
        self.replies += replies

    def save_if_better(self, reply: Reply) -> None:
        """Write the program of a reply to the folder if it is better than the one there."""
        if reply.score > self.score_on_disk and reply.program is not None:
            self.records.document(files.PROGRAM, reply.program)
            self.score_on_disk = reply.score

    def write_turn(self, turn: int, replies: list[Reply]) -> None:
        """Write the log and the best program, each as a whole, a row of metrics, and a line on the console."""
        is_repeated = turn < self.earlier_turns  # the log on the disk has more than this
        if not is_repeated:
            self.write_documents()
        row = {
            "discover/turn": turn,
            "discover/score": max(reply.score for reply in replies),
            "discover/best": self.best.score,
            "discover/valid": sum(reply.is_valid for reply in replies) / len(replies),
            "discover/calls": self.spending.calls,
            "discover/tokens": self.spending.tokens,
            "discover/cost": self.spending.cost,
        }
        self.records.metrics(Counters(rollout_step=turn, clock=self.records.clock).row() | row)
        if is_repeated:
            return
        outcomes = ", ".join(reply.outcome for reply in replies)
        self.console.say(f"turn {turn:<5} {self.spending.calls:>4} calls  best {self.best.score:<6} {outcomes}")
        for reply in replies:
            if reply.result and reply.result["alarm"]:
                self.console.say(f"! ALARM, no score for reply {reply.id}: {reply.result['alarm']}")

    def write_documents(self, ended: str | None = None) -> None:
        """Write the current `program.py` and `conversation_log.json`."""
        self.records.document(files.PROGRAM, self.best.source)
        log = json.dumps(self.log(ended), indent=1, ensure_ascii=False)
        self.records.document(files.CONVERSATION, f"{log}\n")

    def log(self, ended: str | None) -> dict[str, Any]:
        """Return the conversation log; docs/discovery.md explains the fields."""
        run, start, client = self.run, self.begin.start, self.run.client
        return {
            "problem": run.problem,
            "title": self.problem.title,
            "unit": self.problem.unit,
            "strategy": run.strategy,
            "model": self.begin.model,
            "seed": run.seed,
            "settings": {
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
            "system": client.system,
            "first_prompt": self.begin.first,
            "start": {
                "program": start.program,
                "program_sha256": start.result["program_sha256"],
                "score": start.result["score"],
                "result": without_measurements(start.result),
            },
            "turns": [reply.as_row() for reply in self.replies],
            "spent": {
                "calls": self.spending.calls,
                "prompt_tokens": self.spending.prompt_tokens,
                "completion_tokens": self.spending.completion_tokens,
                "cost": round(self.spending.cost, 9),
            },
            "best": {"score": self.best.score, "turn": self.best.turn, "program_sha256": self.best.sha256},
            "record": [dict(row) for row in self.problem.record],
            "ended": ended,
        }

    def conclude(self) -> float:
        """Write the last log, the report and the summary."""
        ended, best, before = self.asker.ended, self.best, self.begin.start.result["score"]
        is_finished = ended.startswith("budget.calls")
        self.write_documents(ended)
        report = write_run_report(self.records.folder)
        self.records.summary(
            {
                "status": "finished" if is_finished else "budget",
                "reason": "" if is_finished else ended,
                "score": best.score,
                "score_before": before,
                "problem": self.problem.name,
                "strategy": self.run.strategy,
                "model": self.begin.model,
                "calls": self.spending.calls,
                "tokens": self.spending.tokens,
                "cost": self.spending.cost,
                "program_sha256": best.sha256,
                **time_summary(self.records.clock),
                "seconds": round(self.journal.seconds, 1),
            }
        )
        say, unit, program = self.console.say, self.problem.unit, self.records.folder / files.PROGRAM
        say(f"\n{ended}: the best program has {best.score} {unit}, the first one had {before}")
        say(f"program    {program}; score it again: rlreason score {program}")
        say(f"log        {self.records.folder / files.CONVERSATION}")
        say(f"report     {report}")
        return float(best.score)


def refuse_unready(run: DiscoverConfig) -> None:
    """Raise `ConfigError` if a run could not begin: no address, or no such problem, prompt or start program."""
    problem = problem_named(run.problem)
    templates_of(run.prompts, problem)
    start_source(run, problem)
    endpoint_of(run)


def endpoint_of(run: DiscoverConfig, model: str | None = None) -> Endpoint:
    """Return where requests are sent; `ConfigError` if unknown. `model`: that of the run so far, if it is resumed."""
    client = run.client
    url = client.base_url or os.environ.get("OPENAI_BASE_URL")
    if not url:
        raise ConfigError(
            "client.base_url=null and OPENAI_BASE_URL is not set: give the address of an OpenAI-compatible server, as "
            "in client.base_url=http://127.0.0.1:8000/v1"
        )
    return Endpoint(
        base_url=url, model=client.model or model or "", key=os.environ.get(client.env_variable),
        temperature=client.temperature,
        max_tokens=client.max_tokens, thinking=client.thinking, timeout_s=client.timeout_s, extra=client.extra or {},
        env_variable=client.env_variable,
    )  # fmt: skip


def start_source(run: DiscoverConfig, problem: DiscoveryProblem) -> str:
    """Return the program that the model begins with."""
    if run.start is None:
        return problem.starter_source.decode("utf-8")
    try:
        return Path(run.start).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"start={run.start} cannot be read ({error}): give a file of Python") from error
