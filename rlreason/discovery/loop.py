"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the endpoint, the start program and its score
    each turn    a question by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A run that goes on walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import json
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.asking import BestProgram, Walk, announce, set_up
from rlreason.discovery.journal import Journal
from rlreason.discovery.report.write import write_run_report
from rlreason.discovery.score import refuse_other_systems
from rlreason.discovery.turns import (
    Conversation,
    Question,
    Reply,
    chosen_of,
    feedback,
    problem_named,
    without_measurements,
)
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter


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
