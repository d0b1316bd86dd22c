"""Score a program: run it in a sandbox, and check its set exactly."""

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlreason.discovery.problem import DiscoveryProblem, problem_named, shipped
from rlreason.discovery.sandbox.contained import Command, Limits, protections, protections_text, run_contained
from rlreason.discovery.sandbox.inside import Refused, read_channel
from rlreason.errors import ConfigError, DataError
from rlreason.records.console import Console
from rlreason.runtime.streams import Answer, Parser
from rlreason.runtime.text import redacted, visible

MOST_SOURCE = 2**20  # bytes of a program
STOPPED = "stopped"  # kind of error of a program that was not scored, because the run ends
SHOWN = 2000  # characters of an error and of the output's tail
Stop = Callable[[], bool]
Score = dict[str, Any]  # docs/discovery.md explains the keys


def score_program(
    source: bytes, problem: DiscoveryProblem, limits: Limits | None = None, stop: Stop = lambda: False
) -> Score:
    """Run a program and check its set, within the limits and leaving nothing behind, whatever it does.

    `stop`: polled; once it returns True, everything is ended. `ConfigError` if this system has no sandbox, or the
    problem's verifier fails.
    """
    limits = limits or Limits()
    score: Score = {
        "problem": problem.name,
        "program_sha256": hashlib.sha256(source).hexdigest(),
        "score": 0,
        "num_points": 0,  # 0 where the set is not valid
        "raw_points": 0,  # rows that the program gave
        "dimension": None,
        "validity": 0.0,  # 1.0 or 0.0
        "error": None,
        "error_kind": None,
        "alarm": None,  # a result that cannot be: look at the verifier
        "seconds": 0.0,  # of the program
        "check_seconds": 0.0,
        "peak_memory_mb": 0.0,
        "protections": {},  # those that were active, by name
        "left_behind": False,  # processes of the program that could not be ended
        "output_tail": "",  # of what the program printed: nothing in it is believed
    }
    try:
        rows = _rows_of(score, source, problem, limits, stop)
        score |= _verdict_on(score, rows, problem, limits, stop)
    except Refused as refused:
        score |= {"error_kind": refused.kind, "error": visible_text(refused.text) or refused.kind}
    return score


def _rows_of(score: Score, source: bytes, problem: DiscoveryProblem, limits: Limits, stop: Stop) -> list[list[int]]:
    """Return the rows that a program gives, with what it took in its score; `Refused` if it gives none."""
    if len(source) > MOST_SOURCE:
        raise Refused("program", f"the program has {len(source)} bytes: at most {MOST_SOURCE} are run")
    arguments = ["program", "{source}", str(problem.most_rows), str(problem.most_digits)]
    outcome = run_contained(Command(arguments, limits.timeout_s, source), limits, stop)
    score |= {"seconds": round(outcome.seconds, 3), "peak_memory_mb": round(outcome.peak_mb, 1)}
    score |= {"protections": protections(limits), "left_behind": outcome.left_behind}
    score["output_tail"] = visible_text(outcome.tail.decode("utf-8", "backslashreplace"))
    over = {
        "timeout": f"the program took longer than {limits.timeout_s:g} s",
        "memory": f"the program took more than {limits.memory_mb} MB of memory",
        "output": f"the program printed more than {limits.output_mb} MB",
        "size": f"the points take more than {limits.channel_mb} MB as text",
        "processes": f"the program ran more than {limits.processes} processes at once",
        STOPPED: "the run was stopped",
    }
    if outcome.stopped == "broken":
        raise DataError(f"the program could not be started in the sandbox: {score['output_tail'][-300:]}")
    if outcome.stopped is not None:
        raise Refused(outcome.stopped, over[outcome.stopped])
    if outcome.exit != 0 or not outcome.channel:
        code = outcome.exit or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise Refused("exit", f"the program ended ({how}) before it gave points")
    rows = read_channel(outcome.channel, problem.most_rows, problem.most_digits)
    score["raw_points"] = len(rows)
    return rows


def _verdict_on(score: Score, rows: list[list[int]], problem: DiscoveryProblem, limits: Limits, stop: Stop) -> Score:
    """Return the verifier's verdict on the rows; `Refused` if checking takes too much."""
    verifier = problem.folder / problem.verifier
    request = {"rows": [" ".join(map(str, row)) for row in rows], "options": dict(problem.options)}
    arguments, readable = ["check", str(verifier), "{source}"], [str(problem.folder)]
    command = Command(arguments, limits.check_timeout_s, json.dumps(request).encode(), readable)
    outcome = run_contained(command, limits, stop)
    score["check_seconds"] = round(outcome.seconds, 3)
    tail = visible_text(outcome.tail.decode("utf-8", "replace"))
    if outcome.stopped == STOPPED:
        raise Refused(STOPPED, "the run was stopped")
    if outcome.stopped == "timeout":
        raise Refused("timeout", f"checking {len(rows)} points takes more than {limits.check_timeout_s:g} s")
    if outcome.stopped == "memory" or tail.endswith("MemoryError"):
        raise Refused("memory", f"checking {len(rows)} points takes more than {limits.memory_mb} MB")
    verdict: Any = None
    with suppress(ValueError):
        verdict = json.loads(outcome.channel)
    if outcome.stopped or outcome.exit != 0 or not isinstance(verdict, dict) or type(verdict.get("score")) is not int:
        why = tail[-300:] or f"it gave no score (exit code {outcome.exit}, {outcome.stopped or 'not stopped'})"
        raise DataError(f"the verifier {verifier} failed: {why}: correct it")
    valid = verdict.pop("valid", False) is True
    verdict["score"] = verdict["score"] if valid else 0
    return {"num_points": verdict["score"]} | verdict | {"raw_points": len(rows), "validity": 1.0 if valid else 0.0}


#: What a reader does not see and a model does: soft hyphens, joiners, variation selectors, tags, halves of characters.
_UNSEEN = re.compile(
    "[\xad\u034f\u115f\u1160\u180e\u2800\u3164\uffa0\u200b-\u200d\u2060-\u2065\u206a-\u206f\ud800-\udfff\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]"
)


def visible_text(text: str) -> str:
    r"""Return a program's text as it may be displayed: cut, without secrets and invisible characters.

    >>> print(visible_text("a\x1b[2J\u200b"))
    a\x1b[2J\u200b
    """
    lines = text[:SHOWN].split("\n")
    seen = "\n".join(_UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}", visible(line)) for line in lines)
    return redacted(seen.strip())


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason score`."""
    parser.add_argument("program", metavar="PROGRAM", help="a file of Python")
    parser.add_argument("--problem", default="kissing_11", help=f"{', '.join(shipped())}, or the folder of one's own")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for the program (600)")
    parser.add_argument("--check-timeout", type=float, default=120.0, metavar="SECONDS", help="for the check (120)")
    parser.add_argument("--memory", default="2G", help="for all of its processes together, as 512M or 2G (2G)")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Score the program."""
    problem, limits = problem_named(arguments.problem, "--problem"), _limits_of(arguments)
    try:
        source = Path(arguments.program).read_bytes()
    except OSError as error:
        why = f"PROGRAM={arguments.program} cannot be read ({error.strerror})"
        raise ConfigError(f"{why}: give a file of Python") from error
    with console.wait(f"running {arguments.program}, for {limits.timeout_s:g} s at most"):
        score = score_program(source, problem, limits)
    return Answer(_text_of(score, problem.unit), score, 0 if score["validity"] else 1)


def _limits_of(arguments: argparse.Namespace) -> Limits:
    for option, value in (("--timeout", arguments.timeout), ("--check-timeout", arguments.check_timeout)):
        if not 0 < value <= 7 * 86400:
            raise ConfigError(f"{option} {value:g} must be above 0 and at most {7 * 86400} seconds: give another")
    match = re.fullmatch(r"(\d+)([MGT])i?B?", arguments.memory.strip(), re.IGNORECASE)
    memory_mb = int(match[1]) * 1024 ** "MGT".index(match[2].upper()) if match else 0
    if not 64 <= memory_mb <= 2**20:
        raise ConfigError(f"--memory {arguments.memory} must be from 64M to 1T: give it as 512M or 2G")
    return Limits(timeout_s=arguments.timeout, memory_mb=memory_mb, check_timeout_s=arguments.check_timeout)


def _text_of(score: Score, unit: str) -> str:
    if score["validity"]:
        lines = [f"valid: {score['score']} {unit}"]
    else:
        given = f", of {score['raw_points']} {unit} given" if score["raw_points"] else ""
        lines = [f"not valid ({score['error_kind']}){given}: {score['error']}"]
        lines += [f"worst pair: {score['worst_pair']}"] if score.get("worst_pair") else []
    times = f"{score['seconds']:.2f} s, checked in {score['check_seconds']:.2f} s"
    lines.append(f"program {score['program_sha256'][:16]}: {times}, {score['peak_memory_mb']:.0f} MB at most")
    if score["output_tail"]:
        lines += ["the end of what it printed, none of which counts:", score["output_tail"][-400:]]
    return "\n".join([*lines, f"protections: {protections_text(score['protections'])}"])
