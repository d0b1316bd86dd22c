"""Set up a run of discovery, and ask the questions of a turn until each has a program."""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.answer import Attempt, program_in
from rlreason.discovery.client import Client, Endpoint, only_model, pause_s, refusal, worth_retrying
from rlreason.discovery.journal import (
    AnswerEvent,
    Ask,
    Begin,
    Journal,
    PartEvent,
    Prices,
    ScoreEvent,
    Spending,
    Start,
    Use,
    prompt_bound,
    use_of,
)
from rlreason.discovery.sandbox.contained import Limits, protections, protections_text
from rlreason.discovery.score import STOPPED, score_program
from rlreason.discovery.turns import DiscoveryProblem, Question, Reply, first_prompt, problem_named, templates_of
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import alive
from rlreason.runtime.text import duration

PATIENCE_S = 5.0  # for answers under way when the run is stopped: they are paid for
Scorer = Callable[[str], dict[str, Any]]


def _not_received(outcome: str) -> bool:
    """Return whether the model never received a request, or its answer was lost."""
    return outcome in ("connection", "timeout") or outcome.startswith("http_")


class Asker:
    """Sends requests to one endpoint, records everything in the journal, and has programs scored as they arrive."""

    def __init__(
        self, run: DiscoverConfig, endpoint: Endpoint, journal: Journal, spending: Spending, score: Scorer
    ) -> None:
        """`score`: scores a program's source, called in other threads, `score.workers` at a time."""
        self.run, self.endpoint, self.client = run, endpoint, Client(endpoint)
        self.journal, self.spending, self._score = journal, spending, score
        self.ended = ""  # which budget allows no more
        self.current: list[Reply] = []  # to the newest question, as far as they have come
        self.on_score: Callable[[Reply], object] = lambda reply: None  # called with every reply that was scored
        self._requests: dict[Future[Attempt], Reply] = {}  # under way
        self._programs: dict[Future[dict[str, Any]], Reply] = {}  # being scored
        self._earlier = set(journal.asks)  # requests of earlier parts
        self._workers = ThreadPoolExecutor(run.score.workers, "score")

    def replies(self, question: Question, samples: int) -> list[Reply]:
        """Return the replies to a question; fewer if the budget ends, [] if it allows none."""
        replies = self.current = [Reply(question, sample) for sample in range(samples)]
        is_answered = question.turn < self.journal.last_turn  # a later question was asked
        for reply in replies:
            self._from_journal(reply)
        try:
            for reply in replies:
                self._begin_scoring(reply)
            while waiting := [reply for reply in replies if not is_answered and self._needs_request(reply)]:
                self._pause(waiting)
                self._send(waiting)
                if not self._requests:
                    break
                while self._requests:
                    self._take_in()
            while self._programs:
                self._take_in()
        except KeyboardInterrupt:
            self._last_answers()
            raise
        replies = [reply for reply in replies if reply.calls]
        self._refuse_if_unreachable(replies)
        return replies

    def _from_journal(self, reply: Reply) -> None:
        """Restore the requests and answers of earlier parts of the run."""
        while ask := self.journal.asks.get(reply.next_id):
            answer = self.journal.answers.get(ask.id)
            use = use_of(ask, answer)
            self.spending.begin(ask.id, ask.prompt_bound, ask.max_tokens)
            self.spending.end(ask.id, use)
            self._add_call(reply, ask.id, answer.outcome if answer else "interrupted", use)
            if answer is not None:
                reply.attempt = Attempt(
                    answer.outcome, answer.content, answer.reasoning, answer.finish_reason, detail=answer.detail
                )
                if answer.outcome == "ok":
                    reply.program = program_in(answer.content)

    def _add_call(self, reply: Reply, id: str, outcome: str, use: Use) -> None:
        reply.calls.append(
            {
                "id": id,
                "outcome": outcome,
                "prompt_tokens": use.prompt_tokens,
                "completion_tokens": use.completion_tokens,
                "tokens_counted": use.counted,
                "cost": round(self.spending.prices.cost(use.prompt_tokens, use.completion_tokens), 9),
            }
        )

    def _needs_request(self, reply: Reply) -> bool:
        """Return whether to request a reply (again).

        Requests of an earlier part that did not reach the model, or were not let in, are repeated: the cause may be
        gone.
        """
        if self.ended or reply.program is not None:
            return False
        failed = [call["outcome"] for call in reply.calls if self._counts(call)]
        if failed and not worth_retrying(failed[-1]):
            raise ConfigError(refusal(reply.attempt or Attempt(failed[-1]), self.endpoint))
        return len(failed) <= self.run.client.retries

    def _counts(self, call: dict[str, Any]) -> bool:
        """Return whether a call counts as a try for its reply: one of this part, or one that the model has answered."""
        outcome = call["outcome"]
        return outcome != "interrupted" and (call["id"] not in self._earlier or not _not_received(outcome))

    def _pause(self, waiting: list[Reply]) -> None:
        """Wait before requests are repeated, as long as the longest wait among them."""
        seconds = 0.0
        for reply in waiting:
            if reply.attempt is None or not self._counts(reply.calls[-1]):
                continue
            wished = reply.attempt.retry_after_s
            factor = self.run.client.pause_s if wished is None else 1.0
            seconds = max(seconds, factor * pause_s(len(reply.calls), wished, self.run.seed))
        until = time.monotonic() + min(seconds, self._seconds_left)
        while (left := until - time.monotonic()) > 0:
            alive()
            time.sleep(min(left, 1.0))

    @property
    def _seconds_left(self) -> float:
        """Return the remaining seconds of the run's hours."""
        hours = self.run.budget.hours
        return math.inf if hours is None else max(0.0, hours * 3600 - self.journal.seconds)

    def _send(self, waiting: list[Reply]) -> None:
        """Send the next request for each of these, as far as the budget allows."""
        for reply in waiting:
            messages, id = reply.question.messages, reply.next_id
            bound = prompt_bound(messages)
            allowed, spent = self.spending.room(bound, self.run.client.max_tokens, self.journal.seconds)
            if spent and not self._requests:
                self.ended = spent
            if spent:  # or reserved for what is under way, which may leave something over
                break
            self.spending.begin(id, bound, allowed)
            self.journal.write(Ask(id=id, prompt_bound=bound, max_tokens=allowed))
            seed = hashlib.sha256(f"{self.run.seed} {self.run.strategy} {id}".encode()).hexdigest()[:7]
            request = self.client.ask(
                messages,
                request_id=f"s{self.run.seed}-{id}",
                seed=int(seed, 16),
                max_tokens=allowed,
                timeout_s=min(self.run.client.timeout_s, max(1.0, self._seconds_left)),
            )
            self._requests[request] = reply

    def _take_in(self) -> None:
        """Wait up to a second for answers and scores, and record those that have come."""
        alive()
        self.journal.beat()
        pending: list[Future[Any]] = [*self._requests, *self._programs]
        done, _ = wait(pending, 1.0, FIRST_COMPLETED)
        for future in done:
            if future in self._requests:
                reply = self._requests.pop(future)
                self._answered(reply, future.result())
                self._begin_scoring(reply)
            else:
                self._scored(self._programs.pop(future), future.result())

    def _last_answers(self) -> None:
        """Record answers that arrive within a few seconds: they are paid for, and need not be requested again."""
        with suppress(TimeoutError):
            for request in as_completed(self._requests, PATIENCE_S):
                self._answered(self._requests[request], request.result())
        for request in self._requests:
            request.cancel()
        for program in self._programs:
            program.cancel()

    def _answered(self, reply: Reply, attempt: Attempt) -> None:
        id, outcome, program = reply.next_id, attempt.outcome, None
        if outcome == "ok" and (program := program_in(attempt.content)) is None:
            outcome = "truncated" if attempt.finish_reason == "length" else "no_code"
        answer = AnswerEvent(
            id=id,
            outcome=outcome,
            content=attempt.content,
            reasoning=attempt.reasoning,
            finish_reason=attempt.finish_reason,
            detail=attempt.detail,
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.completion_tokens,
            retry_after_s=attempt.retry_after_s,
        )
        self.journal.write(answer)
        use = use_of(self.journal.asks[id], answer)
        self.spending.end(id, use)
        self._add_call(reply, id, outcome, use)
        reply.attempt, reply.program = attempt, program

    def _begin_scoring(self, reply: Reply) -> None:
        """Have a reply's program scored, unless it was scored before: in an earlier part, or in another reply."""
        if reply.program is None:
            return
        digest = hashlib.sha256(reply.program.encode("utf-8", "replace")).hexdigest()
        result = self.journal.scores.get(reply.id) or self.journal.by_program.get(digest)
        if result is not None:
            self._scored(reply, result)
        else:
            self._programs[self._workers.submit(self._score, reply.program)] = reply

    def _scored(self, reply: Reply, result: dict[str, Any]) -> None:
        if result["error_kind"] == STOPPED:  # it has no score
            self.ended = self.ended or f"budget.hours={self.run.budget.hours} are spent"
            return
        if reply.id not in self.journal.scores:
            self.journal.write(ScoreEvent(of=reply.id, result=result))
        reply.result = result
        self.on_score(reply)

    def _refuse_if_unreachable(self, replies: list[Reply]) -> None:
        """Raise `ConfigError` if the endpoint answered none of a turn's questions: the run can be resumed."""
        if self.ended or not replies or replies[0].question.turn < self.journal.last_turn:
            return
        if all(not reply.content and _not_received(reply.calls[-1]["outcome"]) for reply in replies):
            attempt = replies[0].attempt or Attempt(replies[0].calls[-1]["outcome"])
            raise ConfigError(refusal(attempt, self.endpoint))


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
