"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the endpoint, the start program and its score
    each turn    a question by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A run that goes on walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.asking import Asker
from rlreason.discovery.client import Endpoint, only_model
from rlreason.discovery.journal import Begin, Journal, PartEvent, Prices, Spending, Start
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


@dataclass
class Walk:
    """A run in progress: its parts, and all replies so far."""

    run: DiscoverConfig
    problem: DiscoveryProblem
    journal: Journal
    asker: Asker
    records: RunWriter
    console: Console
    best: BestProgram
    earlier_turns: int  # of earlier parts, the last of which may not be complete
    on_disk: int  # score of the program in the folder
    replies: list[Reply] = field(default_factory=list)

    @property
    def begin(self) -> Begin:
        """Return the setup of the run, from the journal."""
        assert self.journal.begin is not None
        return self.journal.begin


def discover(run: DiscoverConfig, records: RunWriter, console: Console) -> float:
    """Run `algorithm=discover`, leave everything in the folder of `records`, return the best score."""
    refuse_other_systems()
    problem = problem_named(run.problem)
    records.clock.begin()
    journal = Journal(records.folder / files.CALLS, console.say)
    stop = threading.Event()  # ends running programs
    try:
        walk = set_up(run, problem, journal, records, console, stop)
        announce(walk)
        walk.asker.on_score = partial(save_if_better, walk)
        if not walk.earlier_turns:
            write_documents(walk)
        take_turns(walk)
    finally:
        stop.set()
    return conclude(walk)


def take_turns(walk: Walk) -> None:
    """Ask, score and answer turn by turn until a budget is spent."""
    run, first = walk.run, walk.begin.first
    turn, conversation = 0, Conversation(1, run.client.system, first)
    while not walk.asker.ended:
        turn += 1
        replies = ask(walk, conversation.ask(turn, run.history if run.converses else 0))
        if not replies:
            break
        if run.converses and (chosen := chosen_of(replies)) is not None:
            chosen.chosen = True
            kind, text = feedback(walk.begin.templates, chosen.result, walk.best.score, walk.problem.unit)
            conversation.add(chosen, kind, text)
        write_turn(walk, turn, replies)
        if run.restart_after is not None and conversation.without_progress >= run.restart_after:
            conversation = Conversation(conversation.number + 1, run.client.system, first)


def ask(walk: Walk, question: Question) -> list[Reply]:
    """Return the replies to a question, after recording the best program so far."""
    waiting = f"turn {question.turn}: asking and scoring"
    with walk.records.clock.phase("discover"), walk.console.wait(waiting):
        try:
            replies = walk.asker.replies(question, walk.run.side_by_side)
        except BaseException:
            if question.turn >= walk.earlier_turns:  # every call that was made stands in the log
                take_in(walk, [reply for reply in walk.asker.current if reply.calls])
                with suppress(OSError):
                    write_documents(walk)
            raise
    return take_in(walk, replies)


def take_in(walk: Walk, replies: list[Reply]) -> list[Reply]:
    """Add replies to those of the run, and update the best program."""
    for reply in replies:
        if reply.score > walk.best.score and reply.program is not None and reply.result is not None:
            walk.best = BestProgram(reply.score, reply.program, reply.result["program_sha256"], reply.id)
            reply.improved = True
        reply.best_so_far = walk.best.score
    walk.replies += replies
    return replies


def save_if_better(walk: Walk, reply: Reply) -> None:
    """Write the program of a reply to the folder if it is better than the one there."""
    if reply.score > walk.on_disk and reply.program is not None:
        walk.records.document(files.PROGRAM, reply.program)
        walk.on_disk = reply.score


def write_turn(walk: Walk, turn: int, replies: list[Reply]) -> None:
    """Write the log and the best program, each as a whole, a row of metrics, and a line on the console."""
    records, spending = walk.records, walk.asker.spending
    is_repeated = turn < walk.earlier_turns  # the log on the disk has more than this
    if not is_repeated:
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
    if is_repeated:
        return
    walk.console.say(f"turn {turn:<5} {spending.calls:>4} calls  best {walk.best.score:<6} {outcomes_text(replies)}")
    for reply in replies:
        if reply.result and reply.result["alarm"]:
            walk.console.say(f"! ALARM, no score for reply {reply.id}: {reply.result['alarm']}")


def outcomes_text(replies: list[Reply]) -> str:
    """Return the outcomes of replies, in a few words each."""
    outcomes = []
    for reply in replies:
        if reply.result is None:
            outcome = reply.calls[-1]["outcome"]
            outcomes.append("not scored" if outcome == "ok" else outcome)
        elif reply.result["validity"] == 1.0:
            outcomes.append(str(reply.score))
        else:
            outcomes.append(str(reply.result["error_kind"]))
    return ", ".join(outcomes)


def write_documents(walk: Walk, ended: str | None = None) -> None:
    """Write the current `program.py` and `conversation_log.json`."""
    walk.records.document(files.PROGRAM, walk.best.source)
    log = json.dumps(log_of(walk, ended), indent=1, ensure_ascii=False)
    walk.records.document(files.CONVERSATION, f"{log}\n")


def log_of(walk: Walk, ended: str | None) -> dict[str, Any]:
    """Return the conversation log; docs/discovery.md explains the fields."""
    run, begin, best, spending = walk.run, walk.begin, walk.best, walk.asker.spending
    start, client = begin.start, run.client
    return {
        "problem": run.problem,
        "title": walk.problem.title,
        "unit": walk.problem.unit,
        "strategy": run.strategy,
        "model": begin.model,
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
        "first_prompt": begin.first,
        "start": {
            "program": start.program,
            "program_sha256": start.result["program_sha256"],
            "score": start.result["score"],
            "result": without_measurements(start.result),
        },
        "turns": [reply.as_row() for reply in walk.replies],
        "spent": {
            "calls": spending.calls,
            "prompt_tokens": spending.prompt_tokens,
            "completion_tokens": spending.completion_tokens,
            "cost": round(spending.cost, 9),
        },
        "best": {"score": best.score, "turn": best.turn, "program_sha256": best.sha256},
        "record": [dict(row) for row in walk.problem.record],
        "ended": ended,
    }


def conclude(walk: Walk) -> float:
    """Write the last log, the summary and the report."""
    ended, records, spending = walk.asker.ended, walk.records, walk.asker.spending
    is_finished = ended.startswith("budget.calls")
    before = walk.begin.start.result["score"]
    write_documents(walk, ended)
    report = write_run_report(records.folder, list(walk.problem.record))
    records.summary(
        {
            "status": "finished" if is_finished else "budget",
            "reason": "" if is_finished else ended,
            "score": walk.best.score,
            "score_before": before,
            "problem": walk.problem.name,
            "strategy": walk.run.strategy,
            "model": walk.begin.model,
            "calls": spending.calls,
            "tokens": spending.tokens,
            "cost": spending.cost,
            "program_sha256": walk.best.sha256,
            **time_summary(records.clock),
            "seconds": round(walk.journal.seconds, 1),
        }
    )
    say, unit = walk.console.say, walk.problem.unit
    say(f"\n{ended}: the best program has {walk.best.score} {unit}, the first one had {before}")
    say(f"program    {records.folder / files.PROGRAM}; score it again: rlreason score {records.folder / files.PROGRAM}")
    say(f"log        {records.folder / files.CONVERSATION}")
    say(f"report     {report}")
    return float(walk.best.score)


def set_up(
    run: DiscoverConfig,
    problem: DiscoveryProblem,
    journal: Journal,
    records: RunWriter,
    console: Console,
    stop: threading.Event,
) -> Walk:
    """Build the parts of a run; its setup is recorded, or read if it is resumed."""
    limits = limits_of(run)

    def stopped() -> bool:
        return stop.is_set() or (run.budget.hours is not None and journal.seconds >= run.budget.hours * 3600)

    def score(source: str) -> dict[str, Any]:
        return score_program(source.encode("utf-8", "replace"), problem, limits, stopped).as_dict()

    endpoint = endpoint_of(run, journal.begin.model if journal.begin else None)
    if journal.begin is None:
        endpoint = begin(run, problem, endpoint, journal, console, score)
    elif journal.begin.problem_hash != problem.hash:
        raise ConfigError(
            f"problem={problem.name}: its files have changed since this run began, and scores would not compare: put "
            "them back, or choose another hydra.run.dir"
        )
    journal.write(PartEvent())
    assert journal.begin is not None
    start = journal.begin.start
    best = BestProgram(start.result["score"], start.source, start.result["program_sha256"])
    on_disk = max([best.score, *(result["score"] for result in journal.scores.values())])
    spending = Spending(run.budget, Prices(run.client.prompt_price, run.client.completion_price))
    asker = Asker(run, endpoint, journal, spending, score)
    return Walk(run, problem, journal, asker, records, console, best, journal.last_turn, on_disk)


def refuse_unready(run: DiscoverConfig) -> None:
    """Raise `ConfigError` if a run could not begin: no address, or no such problem, prompt or start program."""
    problem = problem_named(run.problem)
    templates_of(run.prompts, problem)
    start_source(run, problem)
    endpoint_of(run)


def limits_of(run: DiscoverConfig) -> Limits:
    """Return the limits of every program."""
    s = run.score
    return Limits(timeout_s=s.timeout_s, memory_mb=s.memory_mb, check_timeout_s=s.check_timeout_s, cpus=s.cpus)


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


def begin(
    run: DiscoverConfig, problem: DiscoveryProblem, endpoint: Endpoint, journal: Journal, console: Console,
    score: Callable[[str], dict[str, Any]],
) -> Endpoint:  # fmt: skip
    """Record the setup of the run, with its start program scored; return the endpoint with its model."""
    templates = templates_of(run.prompts, problem)
    source = start_source(run, problem)
    with console.wait("scoring the start program"):
        result = score(source)
    if not endpoint.model:
        endpoint = only_model(endpoint)
    more = {"hints": run.prompts.hints, "timeout_s": f"{run.score.timeout_s:g}", "memory_mb": run.score.memory_mb}
    journal.write(
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


def start_source(run: DiscoverConfig, problem: DiscoveryProblem) -> str:
    """Return the program that the model begins with."""
    if run.start is None:
        return problem.starter_source.decode("utf-8")
    try:
        return Path(run.start).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"start={run.start} cannot be read ({error}): give a file of Python") from error


def announce(walk: Walk) -> None:
    """Print where requests go, and how programs are contained."""
    run, say = walk.run, walk.console.say
    several = f", {run.side_by_side} replies at a time" if run.side_by_side > 1 else ""
    say(f"problem    {walk.problem.title}: begins with {walk.best.score} {walk.problem.unit}")
    say(f"asks       {walk.asker.endpoint.model}, {run.strategy}{several}; at most {run.most_spent}")
    limits = limits_of(run)
    active = protections_text(protections(limits), briefly=True)
    say(f"programs   {duration(limits.timeout_s)} and {limits.memory_mb} MB each; held back by {active}")
    if walk.earlier_turns:
        say(f"goes on    in turn {walk.earlier_turns}, after {len(walk.journal.asks)} calls, none of which is repeated")
    say(f"records    {walk.records.folder}; interrupted? resume={walk.records.folder} goes on, and repeats no call")
