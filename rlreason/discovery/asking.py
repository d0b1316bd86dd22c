"""Ask the question of a turn until each of its replies has a program, and have the programs scored."""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.client import WORTH_RETRYING, Client, pause_s, program_in
from rlreason.discovery.journal import Answer, Journal, Messages, Spending, prompt_bound
from rlreason.discovery.log import Reply, Turn, without_measurements
from rlreason.discovery.score import STOPPED
from rlreason.errors import ConfigError
from rlreason.runtime.files import alive

PATIENCE_S = 5.0  # for answers under way when the run is stopped: they are paid for
Score = Callable[[str], dict[str, Any]]


def _not_received(outcome: str) -> bool:
    """Return whether the model never received a request, or its answer was lost."""
    return outcome in ("connection", "timeout") or outcome.startswith("http_")


class Asker:
    """Sends requests to one model, records everything in the journal, and has programs scored as they arrive."""

    def __init__(self, run: DiscoverConfig, client: Client, journal: Journal, spending: Spending, score: Score) -> None:
        """`score`: scores a program's source, called in other threads, `score.workers` at a time."""
        self.run, self.client, self.journal, self.spending = run, client, journal, spending
        self._score = score
        self.ended = ""  # which budget allows no more
        self._not_before = 0.0  # on the monotonic clock: the next request
        self._requests: dict[Future[Answer], Turn] = {}  # under way
        self._programs: dict[Future[dict[str, Any]], Turn] = {}  # being scored
        self._earlier = set(journal.asks)  # requests of earlier parts
        self._workers = ThreadPoolExecutor(run.score.workers, "score")

    def ask(self, messages: Messages, turns: list[Turn]) -> list[Turn]:
        """Get a reply for each of the turns, and its score; return those that a call was made for.

        `ConfigError` if the server refuses the messages, or answered none of them: the run can be resumed.
        """
        is_answered = turns[0].turn < self.journal.last_turn  # a later question was asked
        for turn in turns:
            while ask := self.journal.asks.get(_next_id(turn)):  # in earlier parts of the run
                self.spending.begin(ask)
                self._add_call(turn, ask["id"])
            self._begin_scoring(turn)
        try:
            while not is_answered and (waiting := [turn for turn in turns if self._needs_request(turn)]):
                left = self.spending.seconds_left(self.journal.seconds)
                until = min(self._not_before, time.monotonic() + left)
                while (left := until - time.monotonic()) > 0:
                    alive()
                    time.sleep(min(left, 1.0))
                self._send(messages, waiting)
                if not self._requests:
                    break
                while self._requests:
                    self._wait()
            while self._programs:
                self._wait()
        except KeyboardInterrupt:
            for request in wait(self._requests, PATIENCE_S).done:  # paid for, and need not be requested again
                self._answered(self._requests.pop(request), request.result())
            unfinished: list[Future[Any]] = [*self._requests, *self._programs]
            for future in unfinished:
                future.cancel()
            raise
        made = [turn for turn in turns if turn.calls]
        if made and not (self.ended or is_answered) and all(_not_received(turn.calls[-1].outcome) for turn in made):
            raise ConfigError(self.client.refusal(self.journal.answers[made[0].calls[-1].id]))
        return made

    def _add_call(self, turn: Turn, id: str) -> None:
        """Add a request to those of a turn, with its answer from the journal, if it was not lost."""
        answer = self.journal.answers.get(id)
        turn.calls.append(self.spending.end(id, answer))
        if answer is not None:
            has_text = answer.content or answer.reasoning
            turn.reply = Reply(answer.content, answer.reasoning, answer.finish_reason) if has_text else None
            turn.program = program_in(answer.content) if answer.outcome == "ok" else None

    def _needs_request(self, turn: Turn) -> bool:
        """Return whether to request a reply (again).

        Requests of an earlier part that did not reach the model, or were not let in, are repeated: the cause may be
        gone.
        """
        if self.ended or turn.program is not None:
            return False
        failed = [
            call.outcome
            for call in turn.calls
            if call.outcome != "interrupted" and (call.id not in self._earlier or not _not_received(call.outcome))
        ]
        if failed and not WORTH_RETRYING.fullmatch(failed[-1]):
            raise ConfigError(self.client.refusal(self.journal.answers[turn.calls[-1].id]))
        return len(failed) <= self.run.client.retries

    def _send(self, messages: Messages, waiting: list[Turn]) -> None:
        """Send the next request for each of these, as far as the budget allows."""
        bound, run = prompt_bound(messages), self.run
        for turn in waiting:
            allowed, spent = self.spending.room(bound, run.client.max_tokens, self.journal.seconds)
            if spent and not self._requests:
                self.ended = spent
            if spent:  # or reserved for what is under way, which may leave something over
                break
            id = _next_id(turn)
            self.journal.write("ask", id=id, prompt_bound=bound, max_tokens=allowed)
            self.spending.begin(self.journal.asks[id])
            seed = hashlib.sha256(f"{run.seed} {run.strategy} {id}".encode()).hexdigest()[:7]
            limit = min(run.client.timeout_s, max(1.0, self.spending.seconds_left(self.journal.seconds)))
            request = self.client.ask(messages, f"s{run.seed}-{id}", int(seed, 16), allowed, limit)
            self._requests[request] = turn

    def _wait(self) -> None:
        """Wait up to a second for answers and scores, and record those that have come."""
        alive()
        self.journal.beat()
        pending: list[Future[Any]] = [*self._requests, *self._programs]
        for future in wait(pending, 1.0, FIRST_COMPLETED).done:
            if future in self._requests:
                turn = self._requests.pop(future)
                self._answered(turn, future.result())
                self._begin_scoring(turn)
            else:
                self._scored(self._programs.pop(future), future.result())

    def _answered(self, turn: Turn, answer: Answer) -> None:
        answer.id = _next_id(turn)
        if answer.outcome == "ok" and program_in(answer.content) is None:
            answer.outcome = "truncated" if answer.finish_reason == "length" else "no_code"
        self.journal.write("answer", **msgspec.structs.asdict(answer))
        self._add_call(turn, answer.id)
        if answer.outcome != "ok":
            pause = pause_s(len(turn.calls), self.run.client.pause_s)
            self._not_before = max(self._not_before, time.monotonic() + pause)

    def _begin_scoring(self, turn: Turn) -> None:
        """Have a reply's program scored, unless it was scored before: in an earlier part, or in another reply."""
        if turn.program is None:
            return
        digest = hashlib.sha256(turn.program.encode("utf-8", "replace")).hexdigest()
        result = self.journal.scores.get(turn.id) or self.journal.by_program.get(digest)
        if result is not None:
            self._scored(turn, result)
        else:
            self._programs[self._workers.submit(self._score, turn.program)] = turn

    def _scored(self, turn: Turn, result: dict[str, Any]) -> None:
        if result["error_kind"] == STOPPED:  # it has no score
            self.ended = self.ended or f"budget.hours={self.run.budget.hours} are spent"
            return
        if turn.id not in self.journal.scores:
            self.journal.write("score", of=turn.id, result=result)
        turn.program_sha256 = result["program_sha256"]
        turn.result = without_measurements(result)


def _next_id(turn: Turn) -> str:
    """Return the id of a turn's next request: "TURN.SAMPLE.ATTEMPT"."""
    return f"{turn.id}.{len(turn.calls) + 1}"
