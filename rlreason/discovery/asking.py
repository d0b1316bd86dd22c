"""Ask the questions of a turn until each has a program."""

import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.client import Client, Endpoint, pause_s, refusal, worth_retrying
from rlreason.discovery.code_blocks import program_in
from rlreason.discovery.journal import AnswerEvent, Ask, Attempt, Journal, ScoreEvent, Spending, prompt_bound, use_of
from rlreason.discovery.score import STOPPED
from rlreason.discovery.turns import Question, Reply
from rlreason.errors import ConfigError
from rlreason.runtime.files import alive

PATIENCE_S = 5.0  # for answers under way when the run is stopped: they are paid for


def _not_received(outcome: str) -> bool:
    """Return whether the model never received a request, or its answer was lost."""
    return outcome in ("connection", "timeout") or outcome.startswith("http_")


class Asker:
    """Sends requests to one endpoint, records everything in the journal, and has programs scored as they arrive."""

    def __init__(
        self, run: DiscoverConfig, endpoint: Endpoint, journal: Journal, spending: Spending,
        score: Callable[[str], dict[str, Any]], on_score: Callable[[Reply], object],
    ) -> None:  # fmt: skip
        """`score`: scores a program's source, called in other threads, `score.workers` at a time. `on_score`: called
        with every reply that was scored.
        """
        self.run, self.endpoint, self.client = run, endpoint, Client(endpoint)
        self.journal, self.spending, self._score, self.on_score = journal, spending, score, on_score
        self.ended = ""  # which budget allows no more
        self.current: list[Reply] = []  # to the newest question, as far as they have come
        self._requests: dict[Future[Attempt], Reply] = {}  # under way
        self._programs: dict[Future[dict[str, Any]], Reply] = {}  # being scored
        self._earlier = set(journal.asks)  # requests of earlier parts
        self._workers = ThreadPoolExecutor(run.score.workers, "score")

    def replies(self, question: Question, samples: int) -> list[Reply]:
        """Return the replies to a question; fewer if the budget ends, [] if it allows none.

        `ConfigError` if the endpoint refuses the question, or answered none of its samples: the run can be resumed.
        """
        replies = self.current = [Reply(question, sample) for sample in range(samples)]
        is_answered = question.turn < self.journal.last_turn  # a later question was asked
        for reply in replies:
            while ask := self.journal.asks.get(reply.next_id):  # in earlier parts of the run
                answer = self.journal.answers.get(ask.id)
                self.spending.begin(ask.id, ask.prompt_bound, ask.max_tokens)
                self._add_call(reply, ask, answer)
        try:
            for reply in replies:
                self._begin_scoring(reply)
            while not is_answered and (waiting := [reply for reply in replies if self._needs_request(reply)]):
                self._pause(waiting)
                self._send(waiting)
                if not self._requests:
                    break
                while self._requests:
                    self._wait()
            while self._programs:
                self._wait()
        except KeyboardInterrupt:
            done, late = wait(self._requests, PATIENCE_S)
            for request in done:  # paid for, and need not be requested again
                self._answered(self._requests[request], request.result())
            unfinished: list[Future[Any]] = [*late, *self._programs]
            for future in unfinished:
                future.cancel()
            raise
        replies = [reply for reply in replies if reply.calls]
        lost = [not reply.content and _not_received(reply.calls[-1]["outcome"]) for reply in replies]
        if lost and all(lost) and not self.ended and not is_answered:
            raise ConfigError(refusal(replies[0].attempt or Attempt("connection"), self.endpoint))
        return replies

    def _add_call(self, reply: Reply, ask: Ask, answer: AnswerEvent | None) -> None:
        """Add a request to those of a reply and to the spending; None: its answer was lost."""
        use = use_of(ask, answer)
        self.spending.end(ask.id, use)
        reply.calls.append(
            {
                "id": ask.id,
                "outcome": answer.outcome if answer else "interrupted",
                "prompt_tokens": use.prompt_tokens,
                "completion_tokens": use.completion_tokens,
                "tokens_counted": use.counted,
                "cost": round(self.spending.price(use), 9),
            }
        )
        if answer is not None:
            reply.attempt = answer
            reply.program = program_in(answer.content) if answer.outcome == "ok" else None

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
        pauses = [0.0]
        for reply in waiting:
            if reply.attempt is not None and self._counts(reply.calls[-1]):
                pauses.append(pause_s(len(reply.calls), reply.attempt.retry_after_s, self.run.client.pause_s))
        until = time.monotonic() + min(max(pauses), self._seconds_left)
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

    def _wait(self) -> None:
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

    def _answered(self, reply: Reply, attempt: Attempt) -> None:
        answer = AnswerEvent(id=reply.next_id, **msgspec.structs.asdict(attempt))
        if answer.outcome == "ok" and program_in(answer.content) is None:
            answer.outcome = "truncated" if answer.finish_reason == "length" else "no_code"
        self.journal.write(answer)
        self._add_call(reply, self.journal.asks[answer.id], answer)

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
