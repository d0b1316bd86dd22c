"""`algorithm=discover`: ask a model for programs, score them, tell it what they were worth; the best one is kept.

    setting up   the problem, the server, the start program and its score
    each turn    messages by the strategy -> replies -> their programs' scores -> log, best program, row of metrics
    at the end   report.md

A resumed run walks through the same turns again: what the journal knows is neither asked nor scored twice.
"""

import hashlib
import math
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.client import WORTH_RETRYING, Client, pause_s, program_in
from rlreason.discovery.log import (
    FIRST,
    Answer,
    Event,
    Journal,
    Log,
    Messages,
    Reply,
    Result,
    Spending,
    Turn,
    prompt_bound,
)
from rlreason.discovery.report import write_report
from rlreason.discovery.sandbox import protections
from rlreason.discovery.score import STARTER, STOPPED, DiscoveryProblem, feedback, filled, problem_named, score_program
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.console import Console
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import alive
from rlreason.runtime.text import redacted

#: Parts of a result that differ from run to run: the same replies make the same log.
MEASURED = ("seconds", "check_seconds", "peak_memory_mb", "output_tail")


@dataclass(slots=True)
class Conversation:
    """A conversation with the model: its first messages, the replies that it continued from, what followed each."""

    number: int
    opening: Messages
    exchanges: list[tuple[Turn, str, str]] = field(default_factory=list)  # reply, kind and text of what followed

    @property
    def best(self) -> int:
        """Return the place of the best reply; -1, that of the last one, if none gave a set that counts."""
        scores = [turn.credit for turn, _, _ in self.exchanges]
        return scores.index(max(scores)) if any(scores) else -1

    def ask(self, number: int, samples: int, history: int) -> tuple[Messages, list[Turn]]:
        """Return the next messages and turns to fill: the first, the best reply (or the last), the last `history`."""
        shown = self.exchanges[-history:] if history else []
        if self.exchanges and (best := self.exchanges[self.best]) not in shown:
            shown = [best, *shown]
        messages = list(self.opening)
        for turn, _, text in shown:
            messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": text}]
        return messages, [
            Turn(
                turn=number,
                sample=sample,
                conversation=self.number,
                sees=[turn.id for turn, _, _ in shown],
                prompt=messages[-1]["content"],
                prompt_kind=shown[-1][1] if shown else FIRST,
            )
            for sample in range(samples)
        ]


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
    """A run in progress: its parts, its log so far, and what is under way."""

    def __init__(self, run: DiscoverConfig, records: RunWriter, console: Console) -> None:
        """Set the run up: its start is recorded in the journal, or read from there if it is resumed."""
        self.run, self.records, self.console = run, records, console
        self.problem, templates, source, self.client = parts_of(run)
        self.journal = journal = Journal(records.folder / files.CALLS)
        self.stop = threading.Event()  # ends running programs
        problem, client = self.problem, self.client
        if not journal.begin:
            with console.wait("scoring the start program"):
                result = self.score(source.encode())
            client.model = client.model or client.only_model()
            values = {
                "timeout_s": f"{run.score.timeout_s:g}",
                "memory_mb": run.score.memory_mb,
                "unit": problem.unit,
                "starter": source.strip(),
                "score": result["score"],
                "hints": f"\n{problem.hints.strip()}\n" if run.prompts.hints else "",
            }
            journal.write(
                "begin",
                model=client.model,
                problem=problem.name,
                problem_hash=problem.hash,
                templates=templates,
                first=filled(templates[FIRST], values),
                start={"program": run.start or STARTER, "source": source, "result": result},
            )
        begin = journal.begin
        if begin["problem_hash"] != problem.hash:
            why = f"problem={problem.name}: its files have changed since this run began"
            raise ConfigError(f"{why}, and scores would not compare: put them back, or choose another hydra.run.dir")
        client.model = client.model or begin["model"]
        journal.write("part")
        self.log = first_log(run, problem, begin)
        self.source = begin["start"]["source"]  # of the best program
        self.spending = Spending(run)
        self.earlier = set(journal.asks)  # requests of earlier parts of the run
        # The newest turn with a request, which may not be complete; 0 before the first.
        self.earlier_turns = max((int(id.partition(".")[0]) for id in self.earlier), default=0)
        self.ended = ""  # which budget allows no more
        self._not_before = 0.0  # on the monotonic clock: the next request
        self._programs: dict[Future[Result], Turn] = {}  # being scored
        self._workers = ThreadPoolExecutor(run.score.workers, "score")

    @property
    def seconds_left(self) -> float:
        """Return the remaining seconds of the hours that the run may take."""
        hours = self.run.budget.hours
        return math.inf if hours is None else max(0.0, hours * 3600 - self.journal.seconds)

    def take_turns(self) -> None:
        """Ask, score and answer turn by turn until a budget is spent."""
        run, say, begin, number = self.run, self.console.say, self.journal.begin, 0
        say(f"problem    {self.problem.title}: begins with {self.log.best['score']} {self.problem.unit}")
        say(f"asks       {begin['model']}, {run.strategy}; at most {run.most_spent}")
        say(f"held back  by {', '.join(protections())}")
        say(f"records    {self.records.folder}")
        if not self.earlier_turns:
            self.write_documents()
        opening = [{"role": "system", "content": run.client.system}] if run.client.system else []
        opening.append({"role": "user", "content": begin["first"]})
        conversation = Conversation(1, opening)
        while not self.ended:
            number += 1
            messages, turns = conversation.ask(number, run.side_by_side, run.history)
            with self.records.clock.phase("discover"), self.console.wait(f"turn {number}: asking and scoring"):
                turns = self.fill(messages, turns)
            if not turns:
                break
            for turn in turns:
                if turn.credit > self.log.best["score"] and turn.program is not None:
                    self.log.best = {"score": turn.credit, "turn": turn.id, "program_sha256": turn.program_sha256}
                    self.source, turn.improved = turn.program, True
                turn.best_so_far = self.log.best["score"]
            self.log.turns += turns
            if run.converses and (replied := [turn for turn in turns if turn.content]):
                chosen = max(  # by their sets' scores, else by whether they gave points, else a program
                    replied,
                    key=lambda turn: (turn.credit, bool(turn.result and turn.result["raw_points"]), bool(turn.program)),
                )
                chosen.chosen = True
                result = self.journal.scores[chosen.id] if chosen.result else None
                kind, text = feedback(begin["templates"], result, self.log.best["score"], self.problem.unit)
                conversation.exchanges.append((chosen, kind, text))
            best, spent = self.log.best["score"], self.spending.total()
            score, valid = max(turn.credit for turn in turns), sum(turn.is_valid for turn in turns) / len(turns)
            row = {"discover/turn": number, "discover/score": score, "discover/best": best, "discover/valid": valid}
            row |= {f"discover/{name}": spent[name] for name in ("calls", "tokens", "cost")}
            self.records.metrics(Counters(rollout_step=number, clock=self.records.clock).row() | row)
            if number >= self.earlier_turns:  # else the log on the disk has more than this
                self.write_documents()
                results = [turn.result or {"score": "", "error_kind": turn.calls[-1].outcome} for turn in turns]
                outcomes = ", ".join(str(result["error_kind"] or result["score"]) for result in results)
                say(f"turn {number:<5} {spent['calls']:>4} calls  best {best:<6} {outcomes}")
            without_progress = len(conversation.exchanges) - 1 - conversation.best  # all, if no set counts
            if run.restart_after is not None and without_progress >= run.restart_after:
                conversation = Conversation(conversation.number + 1, opening)

    def fill(self, messages: Messages, turns: list[Turn]) -> list[Turn]:
        """Get replies and scores; return the turns with a call. `ConfigError` if the server refuses or answers none."""
        is_over = turns[0].turn < self.earlier_turns  # a later question was asked
        for turn in turns:
            while ask := self.journal.asks.get(_next_id(turn)):  # in earlier parts of the run
                turn.calls.append(self.spending.begin(ask))
                if answer := self.journal.answers.get(ask["id"]):
                    self._read(turn, answer)
        bound, run, most = prompt_bound(messages), self.run, self.run.client.max_tokens
        while not is_over and (waiting := [turn for turn in turns if self._needs_request(turn)]):
            while (left := min(self._not_before - time.monotonic(), self.seconds_left)) > 0:
                alive()
                time.sleep(min(left, 1.0))
            requests = dict[Future[Answer], Turn]()
            for turn in waiting:
                if spent := self.spending.spent(bound, most, self.seconds_left):
                    self.ended = "" if requests else spent  # what is under way may leave something over
                    break
                id = _next_id(turn)
                self.journal.write("ask", id=id, prompt_bound=bound, max_tokens=most)
                turn.calls.append(self.spending.begin(self.journal.asks[id]))
                seed = hashlib.sha256(f"{run.seed} {run.strategy} {id}".encode()).hexdigest()[:7]
                limit = min(run.client.timeout_s, max(1.0, self.seconds_left))
                requests[self.client.ask(messages, f"s{run.seed}-{id}", int(seed, 16), most, limit)] = turn
            while requests:
                self._wait(requests)
        while self._programs:
            self._wait({})
        made = [turn for turn in turns if turn.calls]
        if made and not (self.ended or is_over) and all(_not_received(turn.calls[-1].outcome) for turn in made):
            raise ConfigError(self.client.refusal(self.journal.answers[made[0].calls[-1].id]))
        return made

    def _needs_request(self, turn: Turn) -> bool:
        """Return whether to request a reply (again); an earlier part's requests that failed do not count."""
        if self.ended or turn.program is not None:
            return False
        failed = [
            call.outcome
            for call in turn.calls
            if call.outcome != "interrupted" and not (call.id in self.earlier and _not_received(call.outcome))
        ]
        if failed and not WORTH_RETRYING.fullmatch(failed[-1]):
            raise ConfigError(self.client.refusal(self.journal.answers[turn.calls[-1].id]))
        return len(failed) <= self.run.client.retries

    def _wait(self, requests: dict[Future[Answer], Turn]) -> None:
        """Wait up to a second for answers and scores, and record those that have come."""
        alive()
        pending: list[Future[Any]] = [*requests, *self._programs]
        for future in wait(pending, 1.0, FIRST_COMPLETED).done:
            if future not in requests:
                self._scored(self._programs.pop(future), future.result())
                continue
            turn, answer = requests.pop(future), future.result()
            if answer.outcome == "ok" and program_in(answer.content) is None:
                answer.outcome = "truncated" if answer.finish_reason == "length" else "no_code"
            self.journal.write("answer", id=turn.calls[-1].id, **msgspec.structs.asdict(answer))
            self._read(turn, answer)
            if answer.outcome != "ok":
                pause = max(pause_s(len(turn.calls), self.run.client.pause_s), answer.retry_after_s or 0)
                self._not_before = max(self._not_before, time.monotonic() + pause)

    def _read(self, turn: Turn, answer: Answer) -> None:
        """Take the answer to the turn's latest request, and have its program scored, unless it was scored before."""
        self.spending.end(turn.calls[-1], answer)
        has_text = answer.content or answer.reasoning
        turn.reply = Reply(answer.content, answer.reasoning, answer.finish_reason) if has_text else None
        if answer.outcome != "ok" or (program := program_in(answer.content)) is None:
            return
        turn.program, source, scores = program, program.encode("utf-8", "replace"), self.journal.scores
        digest = hashlib.sha256(source).hexdigest()
        same = (result for result in scores.values() if result["program_sha256"] == digest)  # of another reply
        if (result := scores.get(turn.id) or next(same, None)) is not None:
            self._scored(turn, result)
        else:
            self._programs[self._workers.submit(self.score, source)] = turn

    def score(self, source: bytes) -> Result:
        """Score a program, until the run stops or its hours are spent."""
        return score_program(
            source, self.problem, self.run.score, stop=lambda: self.stop.is_set() or not self.seconds_left
        )

    def _scored(self, turn: Turn, result: Result) -> None:
        if result["error_kind"] == STOPPED:  # it has no score
            self.ended = self.ended or f"budget.hours={self.run.budget.hours} are spent"
            return
        if turn.id not in self.journal.scores:
            self.journal.write("score", of=turn.id, result=result)
        turn.program_sha256 = result["program_sha256"]
        turn.result = without_measurements(result)

    def write_documents(self) -> None:
        """Write the current `program.py` and `conversation_log.json`, each as a whole."""
        self.records.document(files.PROGRAM, self.source)
        spent = self.spending.total()
        self.log.spent = {name: round(spent[name], 9) for name in spent if name != "tokens"}
        self.records.document(files.CONVERSATION, self.log.text())

    def conclude(self) -> float:
        """Write the last log, the report and the summary."""
        log, folder, total = self.log, self.records.folder, self.spending.total()
        log.ended = ended = self.ended
        self.write_documents()
        write_report([folder], folder)
        is_finished, score = ended.startswith("budget.calls"), log.best["score"]
        self.records.summary(
            {
                "status": "finished" if is_finished else "budget",
                "reason": "" if is_finished else ended,
                "score": score,
                "score_before": log.start["score"],
                "problem": self.problem.name,
                "strategy": log.strategy,
                "model": log.model,
                "program_sha256": log.best["program_sha256"],
                **{name: total[name] for name in ("calls", "tokens", "cost")},
                **time_summary(self.records.clock),
                "seconds": round(self.journal.seconds, 1),
            }
        )
        program, say = folder / files.PROGRAM, self.console.say
        say(f"\n{ended}: the best program has {score} {log.unit}, the first had {log.start['score']}")
        say(f"program    {program}; score it again: rlreason score {program}")
        say(f"report     {folder / files.REPORT}")
        return float(score)


def _next_id(turn: Turn) -> str:
    """Return the id of a turn's next request: "TURN.SAMPLE.ATTEMPT"."""
    return f"{turn.id}.{len(turn.calls) + 1}"


def _not_received(outcome: str) -> bool:
    """Return whether the model never received a request, or its answer was lost."""
    return outcome in ("connection", "timeout") or outcome.startswith("http_")


def without_measurements(result: Result) -> Result:
    """Return a result without what differs from run to run."""
    return {name: value for name, value in result.items() if name not in MEASURED}


def parts_of(run: DiscoverConfig) -> tuple[DiscoveryProblem, dict[str, str], str, Client]:
    """Return problem, templates of prompts, start program and client; `ConfigError` if the run could not begin."""
    problem = problem_named(run.problem)
    path = problem.folder / STARTER if run.start is None else Path(run.start).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"start={run.start} cannot be read ({error}): give a file of Python") from error
    return problem, problem.templates(run.prompts), source, Client(run.client)


def first_log(run: DiscoverConfig, problem: DiscoveryProblem, begin: Event) -> Log:
    """Return the log before the first turn; docs/discovery.md explains the fields."""
    start, client, score = begin["start"], asdict(run.client), asdict(run.score)
    best = {"program_sha256": start["result"]["program_sha256"], "score": start["result"]["score"]}
    return Log(
        problem=run.problem,
        title=problem.title,
        unit=problem.unit,
        strategy=run.strategy,
        model=begin["model"],
        seed=run.seed,
        settings={
            "replies": run.side_by_side,
            **{name: client[name] for name in ("temperature", "thinking", "max_tokens", "retries")},
            "extra": redacted(client["extra"] or {}),
            "hints": run.prompts.hints,
            "restart_after": run.restart_after,
            "history": run.history if run.converses else 0,
            "budget": asdict(run.budget),
            "score": {name: score[name] for name in ("timeout_s", "memory_mb", "check_timeout_s")},
        },
        system=run.client.system,
        first_prompt=begin["first"],
        start={"program": start["program"], **best, "result": without_measurements(start["result"])},
        turns=[],
        spent={},
        best={**best, "turn": "start"},
        record=problem.record,
    )
