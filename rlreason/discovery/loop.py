"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the endpoint, the start program and its score
    each turn    a question by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A run that goes on walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.asking import BestProgram, Walk, announce, set_up
from rlreason.discovery.journal import Journal, log_of
from rlreason.discovery.report.write import write_run_report
from rlreason.discovery.score import refuse_other_systems
from rlreason.discovery.turns import Conversation, Question, Reply, chosen_of, feedback, problem_named
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.rows import Counters
from rlreason.records.status import time_summary
from rlreason.records.writer import RunWriter


def discover(run: DiscoverConfig, records: RunWriter, console: Console) -> float:
    """Run `algorithm=discover`, leave everything in the folder of `records`, return the best score."""
    refuse_other_systems()
    problem = problem_named(run.problem)
    records.clock.begin()
    journal = Journal(records.folder / files.CALLS, console.say)
    with stopped_at_the_end() as stop:
        walk = set_up(run, problem, journal, records, console, stop)
        announce(walk)
        walk.asker.keep = partial(save_if_better, walk)
        if not walk.known_turns:
            write_documents(walk)
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
    """Yield an event that is set when the block ends, which ends running programs."""
    stop = threading.Event()
    try:
        yield stop
    finally:
        stop.set()


def ask(walk: Walk, question: Question) -> list[Reply]:
    """Return the replies to a question, after recording the best program so far."""
    with walk.records.clock.phase("discover"):
        what = f"turn {question.turn}: asking and scoring"
        with walk.console.wait(what):
            try:
                replies = walk.asker.replies(question, walk.run.side_by_side)
            except BaseException:
                if question.turn >= walk.known_turns:  # every call that was made stands in the log
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
    walk.console.say(f"turn {turn:<5} {spending.calls:>4} calls  best {walk.best.score:<6} {outcomes_text(replies)}")
    for reply in replies:
        if reply.result and reply.result["alarm"]:
            walk.console.say(f"! ALARM, no score for reply {reply.id}: {reply.result['alarm']}")


def outcomes_text(replies: list[Reply]) -> str:
    """Return the outcomes of replies, in a few words each."""
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
    """Write the current `program.py` and `conversation_log.json`."""
    log = log_of(walk.run, walk.problem, walk.begin, walk.replies, walk.asker.spending, asdict(walk.best), ended)
    walk.records.document(files.PROGRAM, walk.best.source)
    walk.records.document(files.CONVERSATION, json.dumps(log, indent=1, ensure_ascii=False) + "\n")


def conclude(walk: Walk) -> float:
    """Write the last log, the summary and the report."""
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
            **time_summary(records.clock),
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
