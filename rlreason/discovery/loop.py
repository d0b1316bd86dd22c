"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the endpoint, the start program and its score
    each turn    a question by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A run that goes on walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlreason.config.discover import DiscoverConfig
from rlreason.discovery.asking import Asker
from rlreason.discovery.client import Client, Endpoint
from rlreason.discovery.journal import Journal
from rlreason.discovery.log import log_of
from rlreason.discovery.models import only_model
from rlreason.discovery.problem import Problem, problem_named
from rlreason.discovery.sandbox.contained import Limits
from rlreason.discovery.sandbox.protections import in_words, protections
from rlreason.discovery.scoring import refuse_other_systems, score_program
from rlreason.discovery.spending import Prices, Spending
from rlreason.discovery.texts import feedback, first_prompt, templates_of
from rlreason.discovery.turns import Conversation, Question, Reply, chosen_of
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.counters import Counters
from rlreason.records.where_time_went import where_time_went
from rlreason.records.writer import RunWriter
from rlreason.report.discovery import write_run_report
from rlreason.runtime.text import duration


@dataclass
class Best:
    """The best program so far, and where it came from."""

    score: int
    source: str
    sha256: str
    turn: str = "start"  # or "TURN.SAMPLE"


@dataclass
class Walk:
    """A run on its way: its parts, and all replies so far."""

    run: DiscoverConfig
    problem: Problem
    journal: Journal
    asker: Asker
    records: RunWriter
    console: Console
    best: Best
    known_turns: int  # of earlier parts, the last of which may not be whole
    replies: list[Reply] = field(default_factory=list)

    @property
    def begin(self) -> dict[str, Any]:
        """What the run is made of, as the journal has it."""
        assert self.journal.begin is not None
        return self.journal.begin


def discover(run: DiscoverConfig, records: RunWriter, console: Console) -> float:
    """Do the run, leave everything in the folder of `records`, return the best score."""
    refuse_other_systems()
    problem = problem_named(run.problem)
    records.clock.begin()
    journal = Journal(records.folder / files.CALLS, console.say)
    with stopped_at_the_end() as stop:
        walk = set_up(run, problem, journal, records, console, stop)
        announce(walk)
        turn, conversation = 0, Conversation(1, run.client.system, walk.begin["first"])
        while not walk.asker.ended:
            turn += 1
            question = conversation.ask(turn, run.history if run.converses else 0)
            replies = ask(walk, question)
            if not replies:
                break
            if run.converses and (chosen := chosen_of(replies)) is not None:
                chosen.chosen = True
                kind, text = feedback(walk.begin["templates"], chosen.result, walk.best.score, problem.unit)
                conversation.add(chosen, kind, text)
            write_turn(walk, turn, replies)
            if run.restart_after is not None and conversation.without_progress >= run.restart_after:
                conversation = Conversation(conversation.number + 1, run.client.system, walk.begin["first"])
    return conclude(walk)


@contextmanager
def stopped_at_the_end() -> Iterator[threading.Event]:
    """An event that is set when the block ends: programs under way are ended with it."""
    stop = threading.Event()
    try:
        yield stop
    finally:
        stop.set()


def set_up(
    run: DiscoverConfig, problem: Problem, journal: Journal, records: RunWriter, console: Console, stop: threading.Event
) -> Walk:
    """The parts of a run; its beginning is written down, or read where it goes on."""
    limits = limits_of(run)

    def score(source: str) -> dict[str, Any]:
        return score_program(source.encode("utf-8", "replace"), problem, limits, stop.is_set).as_dict()

    endpoint = endpoint_of(run, journal)
    client = Client(endpoint)
    if journal.begin is None:
        endpoint = begin(run, problem, endpoint, client, journal, console, score)
        client = Client(endpoint)
    else:
        refuse_other_problem(journal.begin, problem)
    journal.write("part")
    assert journal.begin is not None
    start = journal.begin["start"]
    best = Best(start["result"]["score"], start["source"], start["result"]["program_sha256"])
    spending = Spending(run.budget, Prices(run.client.prompt_price, run.client.completion_price))
    asker = Asker(run, endpoint, client, journal, spending, score)
    return Walk(run, problem, journal, asker, records, console, best, journal.last_turn)


def limits_of(run: DiscoverConfig) -> Limits:
    """The limits of every program."""
    s = run.score
    return Limits(timeout_s=s.timeout_s, memory_mb=s.memory_mb, check_timeout_s=s.check_timeout_s, cpus=s.cpus)


def endpoint_of(run: DiscoverConfig, journal: Journal) -> Endpoint:
    """Where questions go; `ConfigError` where nobody says. The model is the journal's where the run goes on."""
    client = run.client
    url = client.base_url or os.environ.get("OPENAI_BASE_URL")
    if not url:
        raise ConfigError(
            "client.base_url=null and OPENAI_BASE_URL is not set: give the address of an OpenAI-compatible server, as "
            "in client.base_url=http://127.0.0.1:8000/v1"
        )
    model = client.model or (journal.begin or {}).get("model") or ""
    return Endpoint(
        base_url=url, model=model, key=os.environ.get(client.env_variable), temperature=client.temperature,
        max_tokens=client.max_tokens, thinking=client.thinking, timeout_s=client.timeout_s, extra=client.extra or {},
        env_variable=client.env_variable,
    )  # fmt: skip


def begin(
    run: DiscoverConfig, problem: Problem, endpoint: Endpoint, client: Client, journal: Journal, console: Console,
    score: Any,
) -> Endpoint:  # fmt: skip
    """Write down what the run is made of, its start program scored; returns the endpoint with its model."""
    templates = templates_of(run.prompts, problem)
    source = start_source(run, problem)
    with console.wait("scoring the start program"):
        result = score(source)
    if not endpoint.model:
        endpoint = only_model(endpoint)
    more = {"hints": run.prompts.hints, "timeout_s": f"{run.score.timeout_s:g}", "memory_mb": run.score.memory_mb}
    journal.write(
        "begin",
        model=endpoint.model,
        problem=problem.name,
        problem_hash=problem.hash,
        templates=templates,
        first=first_prompt(templates["first"], problem, source, result, more),
        start={"program": run.start or problem.starter, "source": source, "result": result},
    )
    return endpoint


def start_source(run: DiscoverConfig, problem: Problem) -> str:
    """The program that the model begins with."""
    if run.start is None:
        return problem.starter_source.decode("utf-8")
    try:
        return Path(run.start).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"start={run.start} cannot be read ({error}): give a file of Python") from error


def refuse_other_problem(begun: dict[str, Any], problem: Problem) -> None:
    """`ConfigError` where the problem is another than the one that the run began with."""
    if begun.get("problem_hash") != problem.hash:
        raise ConfigError(
            f"problem={problem.name}: its files have changed since this run began, and scores would not compare: put "
            "them back, or choose another hydra.run.dir"
        )


def announce(walk: Walk) -> None:
    """What is about to be asked of whom, and how programs are held back."""
    run, say = walk.run, walk.console.say
    asks = f"{run.strategy}" + f", {run.side_by_side} replies at a time" * (run.side_by_side > 1)
    say(f"problem    {walk.problem.title}: begins with {walk.best.score} {walk.problem.unit}")
    say(f"asks       {walk.asker.endpoint.model}, {asks}; at most {run.most_spent}")
    limits = limits_of(run)
    say(f"programs   {duration(limits.timeout_s)} and {limits.memory_mb} MB each; {in_words(protections(limits))}")
    if walk.known_turns:
        say(f"goes on    in turn {walk.known_turns}, after {len(walk.journal.asked)} calls, none of which is repeated")
    say(f"records    {walk.records.folder}; interrupted? resume={walk.records.folder} goes on, and repeats no call")


def ask(walk: Walk, question: Question) -> list[Reply]:
    """The replies to a question, with the best program so far written down."""
    with walk.records.clock.phase("generate"):
        what = f"turn {question.turn}: asking and scoring"
        with walk.console.wait(what):
            replies = walk.asker.replies(question, walk.run.side_by_side)
    for reply in replies:
        if reply.score > walk.best.score and reply.program is not None and reply.result is not None:
            walk.best = Best(reply.score, reply.program, reply.result["program_sha256"], reply.id)
            reply.improved = True
        reply.best_so_far = walk.best.score
    walk.replies += replies
    return replies


def write_turn(walk: Walk, turn: int, replies: list[Reply]) -> None:
    """The log and the best program, each replaced as a whole; a row of metrics; a line for a person."""
    records, spending = walk.records, walk.asker.spending
    again = turn < walk.known_turns  # the log on the disk knows more than this
    if not again:
        write_documents(walk)
    valid = [reply for reply in replies if reply.result and reply.result["validity"] == 1.0]
    row = {
        "discover/turn": turn,
        "discover/score": max(reply.score for reply in replies),
        "discover/best": walk.best.score,
        "discover/valid": len(valid) / len(replies),
        "discover/calls": spending.calls,
        "discover/tokens": spending.tokens,
        "discover/cost": spending.cost,
    }
    records.metrics(Counters(rollout_step=turn, clock=records.clock).row() | row)
    if again:
        return
    walk.console.say(f"turn {turn:<5} {spending.calls:>4} calls  best {walk.best.score:<6} {came_of(replies)}")
    for reply in replies:
        if reply.result and reply.result["alarm"]:
            walk.console.say(f"! ALARM, no score for reply {reply.id}: {reply.result['alarm']}")


def came_of(replies: list[Reply]) -> str:
    """What came of replies, in a few words each."""
    said = []
    for reply in replies:
        if reply.result is None:
            said.append(reply.calls[-1]["outcome"] if reply.calls[-1]["outcome"] != "ok" else "not scored")
        elif reply.result["validity"] == 1.0:
            said.append(f"{reply.score}")
        else:
            said.append(str(reply.result["error_kind"]))
    return ", ".join(said)


def write_documents(walk: Walk, ended: str | None = None) -> None:
    """`program.py` and `conversation_log.json` as they are now."""
    log = log_of(walk.run, walk.problem, walk.begin, walk.replies, walk.asker.spending, asdict(walk.best), ended)
    walk.records.document(files.PROGRAM, walk.best.source)
    walk.records.document(files.CONVERSATION, json.dumps(log, indent=1, ensure_ascii=False) + "\n")


def conclude(walk: Walk) -> float:
    """The last log, the summary and the report."""
    ended, records, spending = walk.asker.ended, walk.records, walk.asker.spending
    write_documents(walk, ended)
    report = write_run_report(records.folder, list(walk.problem.record))
    records.summary(
        {
            "status": "finished" if ended.startswith("budget.calls") else "budget",
            "reason": "" if ended.startswith("budget.calls") else ended,
            "score": walk.best.score,
            "score_before": walk.begin["start"]["result"]["score"],
            "problem": walk.problem.name,
            "strategy": walk.run.strategy,
            "model": walk.begin["model"],
            "calls": spending.calls,
            "tokens": spending.tokens,
            "cost": spending.cost,
            "program_sha256": walk.best.sha256,
            **where_time_went(records.clock),
            "seconds": round(walk.journal.seconds, 1),
        }
    )
    say, unit = walk.console.say, walk.problem.unit
    before = walk.begin["start"]["result"]["score"]
    say(f"\n{ended}: the best program has {walk.best.score} {unit}, the first one had {before}")
    say(f"program    {records.folder / files.PROGRAM}; score it again: rlreason score {records.folder / files.PROGRAM}")
    say(f"log        {records.folder / files.CONVERSATION}")
    say(f"report     {report}")
    return float(walk.best.score)
