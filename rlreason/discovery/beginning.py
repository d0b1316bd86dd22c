"""The beginning of a run of discovery: its problem, endpoint and start program, or how they are read again."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlreason.config.discover import DiscoverConfig
from rlreason.discovery.asking import Asker
from rlreason.discovery.client import Client, Endpoint
from rlreason.discovery.journal import Journal
from rlreason.discovery.models import only_model
from rlreason.discovery.problem import Problem, problem_named
from rlreason.discovery.sandbox.contained import Limits
from rlreason.discovery.sandbox.protections import in_words, protections
from rlreason.discovery.scoring import score_program
from rlreason.discovery.spending import Prices, Spending
from rlreason.discovery.texts import first_prompt, templates_of
from rlreason.discovery.turns import Reply
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
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
    on_disk: int  # score of the program in the folder
    replies: list[Reply] = field(default_factory=list)

    @property
    def begin(self) -> dict[str, Any]:
        """What the run is made of, as the journal has it."""
        assert self.journal.begin is not None
        return self.journal.begin


def set_up(
    run: DiscoverConfig, problem: Problem, journal: Journal, records: RunWriter, console: Console, stop: threading.Event
) -> Walk:
    """The parts of a run; its beginning is written down, or read where it goes on."""
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
    best = Best(start["result"]["score"], start["source"], start["result"]["program_sha256"])
    spending = Spending(run.budget, Prices(run.client.prompt_price, run.client.completion_price))
    asker = Asker(run, endpoint, Client(endpoint), journal, spending, score)
    return Walk(run, problem, journal, asker, records, console, best, journal.last_turn, best_known)


def refuse_unready(run: DiscoverConfig) -> None:
    """`ConfigError` where a run could not begin: no address, no such problem, prompt or start program."""
    problem = problem_named(run.problem)
    templates_of(run.prompts, problem)
    start_source(run, problem)
    endpoint_of(run)


def limits_of(run: DiscoverConfig) -> Limits:
    """The limits of every program."""
    s = run.score
    return Limits(timeout_s=s.timeout_s, memory_mb=s.memory_mb, check_timeout_s=s.check_timeout_s, cpus=s.cpus)


def endpoint_of(run: DiscoverConfig, model: str | None = None) -> Endpoint:
    """Where questions go; `ConfigError` where nobody says. `model`: what the run has asked so far, where it goes on."""
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
    run: DiscoverConfig, problem: Problem, endpoint: Endpoint, journal: Journal, console: Console,
    score: Callable[[str], dict[str, Any]],
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
    held = in_words(protections(limits), briefly=True)
    say(f"programs   {duration(limits.timeout_s)} and {limits.memory_mb} MB each; held back by {held}")
    if walk.known_turns:
        say(f"goes on    in turn {walk.known_turns}, after {len(walk.journal.asked)} calls, none of which is repeated")
    say(f"records    {walk.records.folder}; interrupted? resume={walk.records.folder} goes on, and repeats no call")
