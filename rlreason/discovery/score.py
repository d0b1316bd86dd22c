"""Score a program: run it in a sandbox, check exactly the set that it gives, and believe nothing that it says.

A program gives its set by a function run_code() (points, or points and a dimension), by get_centers(), or as a global
`points`. It runs with an empty environment, in a folder of its own, without network, within limits. The result for a
program is that of --json; exit code 0: the set is valid, 1: it is not.
"""

import argparse
import re
from pathlib import Path

from rlreason.discovery.problem import problem_named, shipped
from rlreason.discovery.sandbox.contained import Limits
from rlreason.discovery.sandbox.protections import in_words, protections
from rlreason.discovery.scoring import MOST_SOURCE, Score, refuse_other_systems, score_program
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.text import duration
from rlreason.runtime.verb import Answer, Parser

UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}  # megabytes
SMALLEST_MB = 64


def add_arguments(parser: Parser) -> None:
    """The arguments of the verb."""
    parser.add_argument("program", metavar="PROGRAM", help="a file of Python")
    parser.add_argument("--problem", default="kissing_11", help=f"{', '.join(shipped())}, or the folder of one's own")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for the program (600)")
    parser.add_argument("--check-timeout", type=float, default=120.0, metavar="SECONDS", help="for the check (120)")
    parser.add_argument("--memory", default="2G", help="for all of its processes together, as 512M or 2G (2G)")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Score the program."""
    problem, limits = problem_named(arguments.problem, "--problem"), limits_of(arguments)
    source = source_of(arguments.program)
    refuse_other_systems()
    with console.wait(f"running {arguments.program}, for {duration(limits.timeout_s)} at most"):
        protections(limits)
        score = score_program(source, problem, limits)
    return Answer(told(score, problem.unit), score.as_dict(), 0 if score.valid else 1)


def limits_of(arguments: argparse.Namespace) -> Limits:
    """The limits that were asked for; `ConfigError` where one is out of its range."""
    for option, value in (("--timeout", arguments.timeout), ("--check-timeout", arguments.check_timeout)):
        if not 0 < value <= 7 * 86400:
            raise ConfigError(f"{option} {value:g} must be above 0 and at most {7 * 86400} seconds: give another")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", arguments.memory.strip(), re.IGNORECASE)
    memory_mb = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not found or not SMALLEST_MB <= memory_mb <= 2**20:
        raise ConfigError(f"--memory {arguments.memory} must be from {SMALLEST_MB}M to 1T: give it as 512M or 2G")
    return Limits(timeout_s=arguments.timeout, memory_mb=memory_mb, check_timeout_s=arguments.check_timeout)


def source_of(word: str) -> bytes:
    """The program's source; `ConfigError` where there is no such file."""
    path = Path(word)
    try:
        if not path.is_file():
            raise ConfigError(f"PROGRAM={word} is no file: give a file of Python")
        with path.open("rb") as file:
            return file.read(MOST_SOURCE + 1)
    except OSError as error:
        raise ConfigError(f"PROGRAM={word} cannot be read ({error.strerror}): give a file of Python") from error


def told(score: Score, unit: str) -> str:
    """The score for a person."""
    if score.valid:
        lines = [f"valid: {score.score} {unit}"]
    elif score.alarm:
        lines = [f"ALARM, no score: {score.alarm}"]
    else:
        given = f", of {score.raw_points} {unit} given" if score.raw_points else ""
        lines = [f"not valid ({score.error_kind}){given}: {score.error}"]
    if (pair := score.facts.get("worst_pair")) and not score.valid:
        lines.append(f"worst pair: {pair['first']} and {pair['second']}, {pair['vectors'][0]} and {pair['vectors'][1]}")
    if score.facts.get("max_squared_norm") is not None:
        told = [f"largest squared norm {score.facts['max_squared_norm']}"]
        if score.facts.get("min_squared_distance") is not None:
            told.append(f"smallest squared distance {score.facts['min_squared_distance']}")
        lines.append(", ".join(told))
    took = (
        f"{score.seconds:.2f} s, checked in {score.check_seconds:.2f} s"
        if score.raw_points
        else f"{score.seconds:.2f} s"
    )
    lines.append(f"program {score.program_sha256[:16]}: {took}, {score.peak_memory_mb:.0f} MB at most")
    if score.left_behind:
        lines.append("! processes of the program could not be ended: look for them with ps, and end them by hand")
    if score.output_tail:
        lines += ["the end of what it printed, none of which counts:", score.output_tail[-400:]]
    return "\n".join([*lines, f"protections: {in_words(score.protections)}"])
