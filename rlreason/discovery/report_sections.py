"""Build the sections of a discovery report: results, methodology, outcomes, quotes, the record."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.logs import Log, Result, SeedGroup, Turn
from rlreason.records.files import PROGRAM
from rlreason.report.content import counted
from rlreason.report.documents import fenced, text
from rlreason.runtime.text import shorten

_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def inline(given: str, most: int = 160) -> str:
    r"""Make a foreign text safe within a line: cut, with all of Markdown and HTML escaped, no links or formulas.

    >>> inline("<b>*a*</b> $x$ https://evil.test @all")
    '&lt;b&gt;\\*a\\*&lt;/b&gt; \\$x\\$ https:\\/\\/evil.test \\@all'
    """
    return _LINKED.sub(lambda match: "".join(f"\\{one}" for one in match[0]), text(shorten(given, most)))


def quoted(given: str, most: int, lines: int = 24) -> list[str]:
    """Return a foreign text in a fence that it cannot end: only beginning and end if it is long."""
    given_lines, half = given.splitlines(), lines // 2
    if len(given_lines) > lines:
        left_out = counted(len(given_lines) - 2 * half, "line")
        given = "\n".join([*given_lines[:half], f"[... {left_out} ...]", *given_lines[-half:]])
    return fenced(shorten(given, most, "both"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    """Return a table of cells that are already Markdown; columns in `numbers` are right-aligned."""
    marks = ["--:" if k in numbers else "---" for k in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *rows)]


def name_in(path: str) -> str:
    """Return the last part of a path; the folders above it are private.

    >>> name_in("/home/me/mine.py"), name_in("kissing_11")
    ('mine.py', 'kissing_11')
    """
    return PurePosixPath(path).name or path


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def figure(value: float) -> str:
    """Return a score or a mean of scores: as a whole number, or else with one digit.

    >>> figure(438.0), figure(153.33), figure(1234)
    ('438', '153.3', '1,234')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def whole_number(value: int) -> str:
    """Return a whole number of any size, cut in its middle if it is long.

    >>> whole_number(10**50)
    '100000000000...000000000000 (51 digits)'
    """
    try:
        digits = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return digits if len(digits) <= 40 else f"{digits[:12]}...{digits[-12:]} ({len(digits)} digits)"


STRATEGIES = {
    "simple": "every call asks the first prompt anew, with nothing before it: independent draws",
    "best_of_n": "several replies to the first prompt side by side, again and again; the verifier selects the best",
    "refine": "one conversation, in which the exact error is given back after a failure, and a larger set is asked for "
    "after a valid one",
    "hybrid": "as refine, with several replies to every prompt, of which the verifier selects the one to go on with",
}
PROMPTS = {
    "first": "the first prompt",
    "error": "the exact error given back",
    "extend": "a larger set asked for",
    "no_code": "a program asked for that was missing",
}
#: Outcomes of calls other than "ok".
CALLS = {
    "timeout": "no answer in time",
    "connection": "no connection",
    "empty": "an empty answer",
    "no_code": "a reply without a program",
    "truncated": "a reply cut at the limit of tokens",
    "broken": "an answer that is not in the protocol",
    "interrupted": "the run was stopped meanwhile",
}
#: Kinds of errors -> (whose they are, what they mean).
ERRORS = {
    "exception": ("program", "it raised an error"),
    "exit": ("program", "it ended before it gave points"),
    "timeout": ("program", "it took too long"),
    "memory": ("program", "it took too much memory"),
    "output": ("program", "it printed without end"),
    "disk": ("program", "it wrote too much"),
    "processes": ("program", "it ran too many processes"),
    "no_points": ("program", "it gave no points"),
    "type": ("program", "it gave values that are no integers"),
    "size": ("program", "it gave too many rows, digits or bytes"),
    "channel": ("program", "what it gave are no rows of integers"),
    "program": ("program", "it cannot be read, or is too large"),
    "empty": ("set", "it has no points"),
    "ragged": ("set", "its rows have different lengths"),
    "dimension": ("set", "its vectors have another dimension"),
    "zero_vector": ("set", "it holds the zero vector"),
    "too_close": ("set", "two of its points are too close, or equal"),
    "alarm": ("set", "its score is impossible: look at the verifier"),
}


def outcome_text(outcome: str) -> str:
    """Return an outcome of a call in words; "" if it is unknown.

    >>> outcome_text("http_429")
    'the endpoint refused it with status 429'
    """
    status = outcome.removeprefix("http_")
    if status != outcome and status.isdecimal() and len(status) == 3:
        return f"the endpoint refused it with status {status}"
    return CALLS.get(outcome, "")


DEFAULT_PROBLEM = "kissing_11"  # of `rlreason score`, which needs no word for it


def progress(settings: Sequence[SeedGroup]) -> str:
    """Return the initial and the final score, and the number of calls."""
    logs = [log for setting in settings for log in setting.logs]
    starts = listed(sorted({figure(log.start.score) for log in logs}))
    if len(logs) > 1:
        finals = sorted(log.best.score for log in logs)
        calls = counted(sum(log.calls for log in logs), "call")
        return (
            f"{counted(len(logs), 'run')} of {counted(len(settings), 'setting')} began at {starts} and stand at "
            f"{figure(finals[0])} to {figure(finals[-1])}, after {calls} in all."
        )
    log = logs[0]
    valid = sum(turn.is_valid for turn in log.turns)
    text = (
        f"The score went from {starts} ({inline(name_in(log.start.program), 60)}) to {figure(log.best.score)} in "
        f"{counted(log.calls, 'call')}, of which {log.answered:,} gave a reply and {valid:,} a valid set."
    )
    xs, bests = log.curve()
    if bests[-1] > bests[0]:
        text += f" The best set came with call {xs[bests.index(bests[-1])]:,}."
    if bests[-1] != log.best.score:
        text += f" The verdicts in the log give {figure(bests[-1])} instead: do not trust it."
    if log.ended is None:
        text += " The run has not ended."
    return text


def run_lines(log: Log) -> list[str]:
    """Return score, hash, figures of the set, how to check it, and the faults of an invalid set."""
    source = f"the program of turn {log.best.turn}" if log.best_turn else "the program that the run began with"
    result = log.best_result
    lines = [f"**{figure(log.best.score)} {inline(log.unit, 40)}**, by {source}. {_file(log)}{_of_set(result)}"]
    if result and (result.validity != 1 or result.alarm is not None):
        reason = result.alarm or result.error or result.error_kind or "no reason given"
        lines += ["", f"It is not valid: {inline(reason, 400)}"]
        if result.worst_pair is not None:
            lines += ["", f"The worst pair: {inline(json.dumps(result.worst_pair), 400)}"]
    return [*lines, "", "Check it again, RUN being the folder of this report:", "", *command(log, "RUN")]


def joint_lines(settings: Sequence[SeedGroup]) -> list[str]:
    """Return the largest set of each setting, named the best of so many runs."""
    largest = [max(setting.logs, key=lambda log: log.best.score) for setting in settings]
    rows = []
    for setting, log in zip(settings, largest, strict=True):
        name, sha = log.folder.resolve().name, hash_code(log.best.program_sha256)
        rows.append([inline(setting.label), figure(log.best.score), str(len(setting.logs)), inline(name), sha])
    head = ["setting", "its largest set", "of so many runs", "run", "SHA-256 of its program"]
    best = max(largest, key=lambda log: log.best.score)
    return [
        *table(head, rows, frozenset({1, 2})),
        "",
        "The largest of several runs says more of their number than of a setting: see Seeds."
        f"{_of_set(best.best_result, 'In the largest of all')} Check one again, RUN being its folder:",
        "",
        *command(best, "RUN"),
    ]


def command(log: Log, run: str) -> list[str]:
    """Return the command that scores a run's program again, in a fence."""
    is_shipped = re.fullmatch(r"[a-z0-9_]+", log.problem) is not None  # else it is somebody's folder
    problem = "" if log.problem == DEFAULT_PROBLEM else f" --problem {log.problem if is_shipped else 'FOLDER'}"
    note = [] if is_shipped else ["", "FOLDER is that of the problem."]
    return ["```bash", f"rlreason score {run}/{PROGRAM}{problem}", "```", *note]


def hash_code(sha256: str | None) -> str:
    """Return a hash as code, or a note if it is no hash."""
    return f"`{sha256}`" if sha256 and re.fullmatch(r"[0-9a-f]{64}", sha256) else "not in the log"


def _file(log: Log) -> str:
    """Return the program's hash, and whether the file in the folder matches it."""
    line = f"{PROGRAM} has the SHA-256 {hash_code(log.best.program_sha256)}."
    try:
        actual = hashlib.sha256((log.folder / PROGRAM).read_bytes()).hexdigest()
    except OSError:
        return f"{line} There is no readable {PROGRAM} in the folder."
    return (
        line if actual == log.best.program_sha256 else f"{line} **The file in the folder has another one**, `{actual}`."
    )


def _of_set(result: Result | None, where: str = "In its set") -> str:
    """Return the largest squared norm and smallest squared distance of a set, if the verifier gives them."""
    facts = []
    if result and result.max_squared_norm is not None:
        facts.append(f"the largest squared norm is {whole_number(result.max_squared_norm)}")
    if result and result.min_squared_distance is not None:
        facts.append(f"the smallest squared distance is {whole_number(result.min_squared_distance)}")
    return f" {where} {listed(facts)}." if facts else ""


QUOTED = 700  # characters of the first prompt
MOST_SETTINGS = 20  # shown in a sentence
MOST_STARTS = 3  # programs to begin with


def methodology(settings: Sequence[SeedGroup]) -> list[str]:
    """Describe how the runs worked, in sentences that follow only from their logs."""
    logs = [log for setting in settings for log in setting.logs]
    one = logs[0]
    problem = inline(name_in(one.problem))
    lines = [
        "A language model writes whole programs, and a verifier scores the set that each one gives. The problem: "
        f"**{inline(one.title) or problem}** ({problem}); the score counts {inline(one.unit)}.",
        "",
        f"- **Model:** {listed(sorted({inline(log.model) for log in logs}))}, through an OpenAI-compatible endpoint.",
    ]
    every = [_overrides(setting) for setting in settings]
    common = [override for override in every[0] if all(override in other for other in every)]
    for setting in settings:
        means = STRATEGIES.get(setting.strategy)
        meaning = f": {means}" if means else ""
        own = [override for override in _overrides(setting) if override not in common]
        lines.append(f"- **Strategy {inline(setting.label)}**{meaning}.{_joined(own, ' Its own settings:')}")
        lines.append(f"  {_spent(setting.logs)}")
    if common:
        several = "All settings alike" if len(settings) > 1 else "Settings"
        lines.append(f"- **{several}:**{_joined(common)} Budgets are hard caps, which count retries.")
    lines += [f"- **Prompts:** {_prompts(logs)}", f"- **Verifier:** {_verifier(logs)}"]
    starts = sorted({f"{inline(name_in(log.start.program))} ({figure(log.start.score)})" for log in logs})
    if len(starts) > MOST_STARTS:
        starts = [*starts[:MOST_STARTS], f"{len(starts) - MOST_STARTS} more"]
    lines.append(f"- **Starting point:** {listed(starts)}.")
    return [*lines, "", "The first prompt, cut:", "", *quoted(one.first_prompt, QUOTED, lines=14)]


def _overrides(setting: SeedGroup) -> list[str]:
    """Return the settings of a run as they are typed, without unset budgets."""
    settings = flat(setting.logs[0].settings)
    return [
        f"{key}={typed_word(value)}"
        for key, value in settings.items()
        if not (key.startswith("budget.") and value is None)
    ]


def _joined(overrides: Sequence[str], start: str = "") -> str:
    if not overrides:
        return ""
    more = f" and {len(overrides) - MOST_SETTINGS} more" if len(overrides) > MOST_SETTINGS else ""
    return f"{start} {', '.join(inline(one, 60) for one in overrides[:MOST_SETTINGS])}{more}."


def _spent(logs: Sequence[Log]) -> str:
    calls = [call for log in logs for turn in log.turns for call in turn.calls]
    estimated = sum(call.tokens_counted not in (None, "by the server") for call in calls)
    tokens = sum((log.spent.prompt_tokens or 0) + (log.spent.completion_tokens or 0) for log in logs)
    cost = sum(log.spent.cost or 0 for log in logs)
    line = f"Spent: {counted(sum(log.spent.calls for log in logs), 'call')}, {counted(tokens, 'token')}"
    if estimated:
        line += f" (those of {counted(estimated, 'call')} not as the server counted them)"
    if cost:
        line += f", cost {cost:g}"
    reasons = Counter("it has not ended" if log.ended is None else inline(log.ended, 120) for log in logs)
    if len(logs) == 1:
        return f"{line}. End: {next(iter(reasons))}."
    ends = "; ".join(f"{reason} ({times})" for reason, times in reasons.most_common(5))
    return f"{line}, in {len(logs)} runs. Ends: {ends}."


def _prompts(logs: Sequence[Log]) -> str:
    systems = {log.system for log in logs}
    if len(systems) > 1:
        system = "several system prompts"
    else:
        system = "a system prompt" if logs[0].system else "no system prompt"
    kinds = Counter(turn.prompt_kind for log in logs for turn in log.turns)
    sent = [f"{PROMPTS.get(kind) or inline(kind, 40)} ({times:,})" for kind, times in kinds.most_common(8)]
    hints = [log.settings.get("hints") for log in logs]
    note = ""
    if all(one is True for one in hints):
        note = " with hints on known constructions"
    elif all(one is False for one in hints):
        note = " without hints"
    return f"{system}; the first prompt has {len(logs[0].first_prompt):,} characters{note}. Sent: {listed(sent)}."


def _verifier(logs: Sequence[Log]) -> str:
    results = [turn.result for log in logs for turn in log.turns if turn.result]
    results += [log.start.result for log in logs if log.start.result]
    dimensions = sorted({result.dimension for result in results if result.dimension is not None and result.validity})
    where = f" in dimension {listed([str(d) for d in dimensions])}" if dimensions else ""
    text = (
        f"each program ran in processes of its own; what counts is its set alone{where}, checked in whole numbers of "
        "any size and without a tolerance. Nothing that a program prints is believed, and an invalid set scores 0."
    )
    every = [names for result in results if (names := _names(result.protections))]
    if not every:
        return f"{text} The log does not name the protections that held."
    common = sorted(set.intersection(*map(set, every)))
    active = listed([inline(name, 120) for name in common]) or "not the same ones always"
    return f"{text} Protections that held: {active}."


def _names(protections: Any) -> list[str]:
    if isinstance(protections, Mapping):
        return [f"{name} ({how})" if isinstance(how, str) and how else str(name) for name, how in protections.items()]
    return [str(one) for one in protections] if isinstance(protections, list) else []


GROUPS = ("call", "program", "set", "verdict", "valid set")  # the first column of the table, in its order


def failures(settings: Sequence[SeedGroup]) -> list[str]:
    """Return a table of the outcomes of calls, programs and sets, with a column for each setting."""
    columns = [_outcomes(setting.logs) for setting in settings]
    keys = sorted({key for column in columns for key in column}, key=lambda key: (GROUPS.index(key[0]), key[1]))
    if not keys:
        return ["No call has been made yet."]
    labels = [inline(setting.label, 60) for setting in settings] if len(settings) > 1 else ["times"]
    head = ["what", "kind", "meaning", *labels]
    rows = []
    for group, kind in keys:
        meaning = outcome_text(kind) if group == "call" else ERRORS[kind][1] if kind in ERRORS else ""
        rows.append([group, inline(kind, 40), meaning, *(f"{column[group, kind]:,}" for column in columns)])
    lines = table(head, rows, frozenset(range(3, len(head))))
    errors: dict[str, list[str]] = {}
    for turn in (turn for setting in settings for log in setting.logs for turn in log.turns):
        if turn.result and not turn.is_valid and turn.result.error:
            errors.setdefault(turn.result.error_kind or "invalid", []).append(turn.result.error)
    if errors:
        lines += ["", "The first error of the most frequent kinds:", ""]
    for kind in sorted(errors, key=lambda kind: -len(errors[kind]))[:3]:
        lines.append(f"- {inline(kind, 40)}: {inline(errors[kind][0], 200)}")
    return lines


def _outcomes(logs: Sequence[Log]) -> Counter[tuple[str, str]]:
    outcomes: Counter[tuple[str, str]] = Counter()
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            outcomes.update(("call", call.outcome) for call in turn.calls if call.outcome != "ok")
            if turn.is_valid:
                outcomes["valid set", "better than before" if turn.credit > best else "no better"] += 1
            elif turn.result is not None:
                kind = turn.result.error_kind or ("alarm" if turn.result.alarm else "invalid")
                outcomes[ERRORS.get(kind, ("verdict",))[0], kind] += 1
            best = max(best, turn.credit)
    return outcomes


MOST_QUOTED = 3  # turns


class ScoreStep(NamedTuple):
    """A turn that raised the best score of its run, and the score before it."""

    log: Log
    turn: Turn
    before: int


def quotes(logs: Sequence[Log]) -> list[str]:
    """Quote the prompts and replies that raised the score most, cut and fenced, in the order of runs and turns."""
    steps = []
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            if turn.credit > best:
                steps.append(ScoreStep(log, turn, best))
                best = turn.credit
    if not steps:
        return ["No reply has moved the score."]
    largest = sorted(range(len(steps)), key=lambda k: steps[k].before - steps[k].turn.credit)[:MOST_QUOTED]
    lines: list[str] = []
    for log, turn, before in (steps[k] for k in sorted(largest)):
        run = "" if len(logs) == 1 else f"{inline(log.strategy, 40)}, seed {whole_number(log.seed)}, "
        kind = PROMPTS.get(turn.prompt_kind) or inline(turn.prompt_kind, 40)
        heading = f"**{run}turn {turn.id}: {figure(before)} to {figure(turn.credit)}**"
        if turn.prompt == log.first_prompt:
            lines += [f"{heading} ({kind}, see above). The reply, cut:", ""]
        else:
            prompt = quoted(turn.prompt, QUOTED, lines=10)
            lines += [f"{heading} ({kind}). The prompt and the reply, cut:", "", *prompt, ""]
        content = (turn.reply.content if turn.reply else "") or turn.program or ""
        lines += [*quoted(content, QUOTED, lines=20), ""]
    return lines[:-1]


LARGEST_SCORE = 1e15


def records_of(record: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return (score, who) of the entries of a problem's `record` that have a number as their score."""
    entries = []
    for row in record:
        score = row.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= LARGEST_SCORE:
            entries.append((float(score), str(row.get("who") or "")))
    return entries


def standing(record: Sequence[Mapping[str, Any]], score: int, unit: str) -> list[str]:
    """Return the record of a problem, and where a score ranks among it."""
    if not record:
        return ["The problem names no records."]
    rows = [
        [
            inline(typed_word(row.get("score")), 30),
            inline(str(row.get("who") or ""), 80),
            inline(str(row.get("note") or "")),
        ]
        for row in record
    ]
    lines = [*table([inline(unit, 30), "who", "note"], rows, frozenset({0})), ""]
    ranked = sorted(records_of(record), key=lambda one: one[0])
    if not ranked:
        return [*lines, ""]
    below, above = [one for one in ranked if one[0] <= score], [one for one in ranked if one[0] > score]
    reached = f"reaches {figure(below[-1][0])} ({inline(below[-1][1], 80)})" if below else "reaches none of these"
    if above:
        ahead = f"; the next above it is {figure(above[0][0])} ({inline(above[0][1], 80)})."
    else:
        ahead = ", the highest figure of the table: check it by other means before you believe it."
    return [*lines, f"The best score here, {figure(score)}, {reached}{ahead}"]
