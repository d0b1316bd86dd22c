"""Set up a run of discovery, and ask the questions of a turn until each has a program."""

import hashlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.client import (
    Attempt,
    Client,
    Endpoint,
    only_model,
    pause_s,
    program_in,
    refusal,
    worth_retrying,
)
from rlreason.discovery.journal import Journal, Prices, Spending, id_of, prompt_bound, use_of
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


def _unheard(outcome: str) -> bool:
    """Return whether the model never received a request, or its answer was lost."""
    return outcome in ("connection", "timeout") or outcome.startswith("http_")


class Asker:
    """Sends requests to one endpoint, records everything in the journal, and has programs scored as they arrive."""

    def __init__(
        self,
        run: DiscoverConfig,
        endpoint: Endpoint,
        client: Client,
        journal: Journal,
        spending: Spending,
        score: Scorer,
    ) -> None:
        """`score`: scores a program's source, called in threads of its own, `score.workers` at a time."""
        self.run, self.endpoint, self.client = run, endpoint, client
        self.journal, self.spending, self._score = journal, spending, score
        self.ended = ""  # which budget allows no more
        self.current: list[Reply] = []  # of the newest question, as far as they have come
        self.keep: Callable[[Reply], object] = lambda reply: None  # called with every reply that was scored
        self._done: queue.Queue[tuple[str, str, Any]] = queue.Queue()  # kind, id, what came of it
        self._asked: set[str] = set()  # replies that are waited for
        self._scoring: set[str] = set()  # replies whose programs run
        self._earlier = set(journal.asked)  # requests of earlier parts
        self._places = threading.BoundedSemaphore(run.score.workers)

    def replies(self, question: Question, samples: int) -> list[Reply]:
        """Return the replies to a question; fewer if the budget ends, [] if it allows none."""
        replies = [Reply(question, sample) for sample in range(samples)]
        self.current, by_id = replies, {reply.id: reply for reply in replies}
        for reply in replies:
            self._from_journal(reply)
        over = question.turn < self.journal.last_turn  # a later question was asked: this one is answered
        try:
            self._scoring |= {r.id for r in replies if r.program is not None and self._begin_scoring(r)}
            while waiting := [r for r in replies if not over and self._asks_again(r)]:
                self._pause(waiting)
                self._send(waiting)
                if not self._asked:
                    break
                self._collect(by_id)
            self._collect(by_id, whole=True)
        except KeyboardInterrupt:
            self._last_answers(by_id)
            self.client.stop()
            raise
        begun = [reply for reply in replies if reply.calls]
        self._refuse_if_unreachable(begun)
        return begun

    def _from_journal(self, reply: Reply) -> None:
        """Restore the requests and answers of earlier parts of the run."""
        attempt = 1
        while (id := id_of(reply.question.turn, reply.sample, attempt)) in self.journal.asked:
            asked, answer = self.journal.asked[id], self.journal.answers.get(id)
            use = use_of(asked, answer)
            self.spending.add(use)
            self._note_call(reply, id, answer["outcome"] if answer else "interrupted", use)
            if answer is not None:
                said = (answer["content"], answer.get("reasoning"), answer.get("finish_reason"))
                reply.attempt = Attempt(answer["outcome"], *said, detail=str(answer.get("detail")))
                if answer["outcome"] == "ok":
                    reply.program = program_in(answer["content"])
            attempt += 1

    def _note_call(self, reply: Reply, id: str, outcome: str, use: Any) -> None:
        cost = self.spending.prices.cost(use.prompt_tokens, use.completion_tokens)
        counts = {"prompt_tokens": use.prompt_tokens, "completion_tokens": use.completion_tokens}
        told = {"id": id, "outcome": outcome, **counts, "tokens_counted": use.counted, "cost": round(cost, 9)}
        reply.calls.append(told)

    def _asks_again(self, reply: Reply) -> bool:
        """Return whether to request a reply (again).

        Requests of an earlier part that did not reach the model, or were not let in, are repeated: the cause may be
        gone.
        """
        if self.ended or reply.program is not None:
            return False
        failed = [call["outcome"] for call in reply.calls if self._counts(call)]
        if failed and not worth_retrying(failed[-1]):
            attempt = reply.attempt or Attempt(failed[-1])
            raise ConfigError(refusal(attempt, self.endpoint))
        return len(failed) <= self.run.client.retries

    def _counts(self, call: dict[str, Any]) -> bool:
        """Return whether a call counts as a try for its reply: one of this part, or one that the model has answered."""
        outcome = call["outcome"]
        return outcome != "interrupted" and (call["id"] not in self._earlier or not _unheard(outcome))

    def _pause(self, waiting: list[Reply]) -> None:
        """Wait before requests are repeated, as long as the longest wait among them."""
        seconds = 0.0
        for reply in waiting:
            if (attempt := reply.attempt) is not None and self._counts(reply.calls[-1]):
                asked, factor = (
                    attempt.retry_after_s,
                    1.0 if attempt.retry_after_s is not None else self.run.client.pause_s,
                )
                seconds = max(seconds, factor * pause_s(len(reply.calls), asked, self.run.seed))
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
            messages = reply.question.messages
            bound, wanted = prompt_bound(messages), self.run.client.max_tokens
            allowed, spent = self.spending.room(bound, wanted, self.journal.seconds)
            if spent and not self._asked:
                self.ended = spent
            if spent:  # or set aside for what is under way, which may leave something over
                break
            id = id_of(reply.question.turn, reply.sample, len(reply.calls) + 1)
            self.spending.begin(id, bound, allowed)
            self.journal.write("ask", id=id, prompt_bound=bound, max_tokens=allowed)
            self._in_thread("answer", reply.id, partial(self._ask, id, messages, allowed))
            self._asked.add(reply.id)

    def _ask(self, id: str, messages: list[dict[str, str]], max_tokens: int) -> Attempt:
        limit = min(self.run.client.timeout_s, max(1.0, self._seconds_left))
        seed = int(hashlib.sha256(f"{self.run.seed} {self.run.strategy} {id}".encode()).hexdigest()[:7], 16)
        request = f"s{self.run.seed}-{id}"
        return self.client.ask(messages, request_id=request, seed=seed, max_tokens=max_tokens, timeout_s=limit)

    def _in_thread(self, kind: str, id: str, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self._done.put((kind, id, work()))
            except BaseException as error:
                self._done.put((kind, id, error))

        threading.Thread(target=run, daemon=True, name=f"{kind} {id}").start()

    def _collect(self, replies: dict[str, Reply], whole: bool = False) -> None:
        """Receive answers until all requests are answered, and with `whole` until all programs are scored."""
        while self._asked or (whole and self._scoring):
            alive()
            self.journal.beat()
            with suppress(queue.Empty):
                self._take_in(replies, *self._done.get(timeout=1.0))

    def _take_in(self, replies: dict[str, Reply], kind: str, id: str, came: Any) -> None:
        if isinstance(came, BaseException):
            raise came
        if kind == "score":
            self._scoring.discard(id)
            self._scored(replies[id], came)
            return
        self._asked.discard(id)
        self._answered(replies[id], came)
        if replies[id].program is not None and self._begin_scoring(replies[id]):
            self._scoring.add(id)

    def _last_answers(self, replies: dict[str, Reply]) -> None:
        """Record answers that arrive within a few seconds: they are paid for, and need not be requested again."""
        until = time.monotonic() + PATIENCE_S
        while self._asked and (wait := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                kind, id, came = self._done.get(timeout=wait)
                if kind == "answer" and isinstance(came, Attempt):
                    self._asked.discard(id)
                    self._answered(replies[id], came)

    def _answered(self, reply: Reply, attempt: Attempt) -> None:
        id = id_of(reply.question.turn, reply.sample, len(reply.calls) + 1)
        outcome, program = attempt.outcome, None
        if outcome == "ok" and (program := program_in(attempt.content)) is None:
            outcome = "truncated" if attempt.finish_reason == "length" else "no_code"
        self.journal.answer(id, attempt, outcome, retry_after_s=attempt.retry_after_s)
        use = use_of(self.journal.asked[id], self.journal.answers[id])
        self.spending.end(id, use)
        self._note_call(reply, id, outcome, use)
        reply.attempt, reply.program = attempt, program

    def _begin_scoring(self, reply: Reply) -> bool:
        """Have a reply's program scored, unless it was scored before: in an earlier part, or in another reply."""
        assert reply.program is not None
        source = reply.program
        digest = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()
        known = self.journal.scores.get(reply.id) or self.journal.by_program.get(digest)
        if known is not None:
            self._scored(reply, known)
            return False

        def work() -> dict[str, Any]:
            with self._places:
                return self._score(source)

        self._in_thread("score", reply.id, work)
        return True

    def _scored(self, reply: Reply, result: dict[str, Any]) -> None:
        if result["error_kind"] == STOPPED:  # nothing is known of it
            self.ended = self.ended or f"budget.hours={self.run.budget.hours} are spent"
            return
        if reply.id not in self.journal.scores:
            self.journal.write("score", of=reply.id, result=result)
        reply.result = result
        self.keep(reply)

    def _refuse_if_unreachable(self, replies: list[Reply]) -> None:
        """Raise `ConfigError` if the endpoint answered none of a turn's questions: the run can be resumed."""
        last = [reply.calls[-1]["outcome"] for reply in replies if not reply.content]
        if self.ended or not replies or len(last) < len(replies):
            return
        if all(map(_unheard, last)) and replies[0].question.turn >= self.journal.last_turn:
            raise ConfigError(refusal(replies[0].attempt or Attempt(last[0]), self.endpoint))


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
    known_turns: int  # of earlier parts, the last of which may not be whole
    on_disk: int  # score of the program in the folder
    replies: list[Reply] = field(default_factory=list)

    @property
    def begin(self) -> dict[str, Any]:
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

    def over() -> bool:
        return stop.is_set() or (run.budget.hours is not None and journal.seconds >= run.budget.hours * 3600)

    def score(source: str) -> dict[str, Any]:
        return score_program(source.encode("utf-8", "replace"), problem, limits, over).as_dict()

    endpoint = endpoint_of(run, (journal.begin or {}).get("model"))
    if journal.begin is None:
        endpoint = begin(run, problem, endpoint, journal, console, score)
    else:
        refuse_other_problem(journal.begin, problem)
    journal.write("part")
    assert journal.begin is not None
    start = journal.begin["start"]
    known = [result["score"] for result in journal.scores.values() if isinstance(result.get("score"), int)]
    best_known = max([start["result"]["score"], *known])
    best = BestProgram(start["result"]["score"], start["source"], start["result"]["program_sha256"])
    spending = Spending(run.budget, Prices(run.client.prompt_price, run.client.completion_price))
    asker = Asker(run, endpoint, Client(endpoint), journal, spending, score)
    return Walk(run, problem, journal, asker, records, console, best, journal.last_turn, best_known)


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
        "begin",
        model=endpoint.model,
        problem=problem.name,
        problem_hash=problem.hash,
        templates=templates,
        first=first_prompt(templates["first"], problem, source, result, more),
        start={"program": run.start or problem.starter, "source": source, "result": result},
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


def refuse_other_problem(begun: dict[str, Any], problem: DiscoveryProblem) -> None:
    """Raise `ConfigError` if the problem differs from the one that the run began with."""
    if begun.get("problem_hash") != problem.hash:
        raise ConfigError(
            f"problem={problem.name}: its files have changed since this run began, and scores would not compare: put "
            "them back, or choose another hydra.run.dir"
        )


def announce(walk: Walk) -> None:
    """Print where requests go, and how programs are contained."""
    run, say = walk.run, walk.console.say
    asks = f"{run.strategy}" + f", {run.side_by_side} replies at a time" * (run.side_by_side > 1)
    say(f"problem    {walk.problem.title}: begins with {walk.best.score} {walk.problem.unit}")
    say(f"asks       {walk.asker.endpoint.model}, {asks}; at most {run.most_spent}")
    limits = limits_of(run)
    held = protections_text(protections(limits), briefly=True)
    say(f"programs   {duration(limits.timeout_s)} and {limits.memory_mb} MB each; held back by {held}")
    if walk.known_turns:
        say(f"goes on    in turn {walk.known_turns}, after {len(walk.journal.asked)} calls, none of which is repeated")
    say(f"records    {walk.records.folder}; interrupted? resume={walk.records.folder} goes on, and repeats no call")
