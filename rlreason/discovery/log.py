"""`conversation_log.json`: the entire conversation of a run, as the course asks for it. No times are in it, so that the
same replies make the same file twice; they stand in `calls.jsonl`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlreason.config.discover import DiscoverConfig
from rlreason.discovery.journal import Spending
from rlreason.discovery.turns import DiscoveryProblem, Reply, without_measurements


def log_of(
    run: DiscoverConfig,
    problem: DiscoveryProblem,
    begin: Mapping[str, Any],
    replies: Sequence[Reply],
    spending: Spending,
    best: Mapping[str, Any],
    ended: str | None,
) -> dict[str, Any]:
    """Return the log. `begin`: the journal's first event; `best`: score, sha256 and turn of the best program."""
    start, client = begin["start"], run.client
    return {
        "problem": run.problem,
        "title": problem.title,
        "unit": problem.unit,
        "strategy": run.strategy,
        "model": begin["model"],
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
            "score": {name: asdict(run.score)[name] for name in ("timeout_s", "memory_mb", "check_timeout_s")},
            "budget": asdict(run.budget),
        },
        "system": client.system,
        "first_prompt": begin["first"],
        "start": {
            "program": start["program"],
            "program_sha256": start["result"]["program_sha256"],
            "score": start["result"]["score"],
            "result": without_measurements(start["result"]),
        },
        "turns": [reply.as_row() for reply in replies],
        "spent": {
            "calls": spending.calls,
            "prompt_tokens": spending.prompt_tokens,
            "completion_tokens": spending.completion_tokens,
            "cost": round(spending.cost, 9),
        },
        "best": {"score": best["score"], "turn": best["turn"], "program_sha256": best["sha256"]},
        "record": [dict(row) for row in problem.record],
        "ended": ended,
    }
