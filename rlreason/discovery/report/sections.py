"""Build the sections of a discovery report: results, methodology, outcomes, quotes."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.report.read import Log, Result, Turn
from rlreason.discovery.report.texts import (
    ERRORS,
    PROMPTS,
    STRATEGIES,
    SeedGroup,
    counted,
    figure,
    inline,
    listed,
    name_in,
    outcome_text,
    quoted,
    table,
    times_word,
    whole_number,
)
from rlreason.records.files import PROGRAM

MOST_BYTES = 1 << 24  # of a program
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
    return text + ("" if log.ended is not None else " The run has not ended.")


def run_lines(log: Log) -> list[str]:
    """Return score, hash, figures of the set, how to check it, and the faults of an invalid set."""
    result = log.best_turn.result if log.best_turn else log.start.result
    whose = f"the program of turn {log.best.turn}" if log.best_turn else "the program that the run began with"
    lines = [f"**{figure(log.best.score)} {inline(log.unit, 40)}**, by {whose}. {_file(log)}"]
    if told := _of_set(result):
        lines[0] += f" In its set {told}."
    lines += invalid(result)
    return [*lines, "", "Check it again, RUN being the folder of this report:", "", *command(log, "RUN")]


def joint_lines(settings: Sequence[SeedGroup]) -> list[str]:
    """Return the largest set of each setting, named the best of so many runs."""
    rows = []
    for setting in settings:
        log = max(setting.logs, key=lambda one: one.best.score)
        runs, sha = len(setting.logs), hash_word(log.best.program_sha256)
        rows.append([inline(setting.label), figure(log.best.score), str(runs), inline(name_of(log)), sha])
    head = ["setting", "its largest set", "of so many runs", "run", "SHA-256 of its program"]
    best = max((log for setting in settings for log in setting.logs), key=lambda one: one.best.score)
    result = best.best_turn.result if best.best_turn else best.start.result
    told = f" In the largest of all {told}." if (told := _of_set(result)) else ""
    return [
        *table(head, rows, frozenset({1, 2})),
        "",
        f"The largest of several runs says more of their number than of a setting: see Seeds.{told} Check one again, "
        "RUN being its folder:",
        "",
        *command(best, "RUN"),
    ]


def command(log: Log, run: str) -> list[str]:
    """Return the command that scores a run's program again, in a fence."""
    is_shipped = re.fullmatch(r"[a-z0-9_]+", log.problem) is not None  # else it is somebody's folder
    problem = "" if log.problem == DEFAULT_PROBLEM else f" --problem {log.problem if is_shipped else 'FOLDER'}"
    told = [] if is_shipped else ["", "FOLDER is that of the problem."]
    return ["```bash", f"rlreason score {run}/{PROGRAM}{problem}", "```", *told]


def name_of(log: Log) -> str:
    """Return the name of a run's folder."""
    return log.folder.resolve().name


def hash_word(sha256: str | None) -> str:
    """Return a hash as code, or a note if it is no hash."""
    return f"`{sha256}`" if sha256 and re.fullmatch(r"[0-9a-f]{64}", sha256) else "not in the log"


def _file(log: Log) -> str:
    """Return the program's hash, and whether the file in the folder matches it."""
    told = f"{PROGRAM} has the SHA-256 {hash_word(log.best.program_sha256)}."
    found = _sha256(log.folder / PROGRAM)
    if found is None:
        return f"{told} There is no readable {PROGRAM} in the folder."
    return (
        told if found == log.best.program_sha256 else f"{told} **The file in the folder has another one**, `{found}`."
    )


def _sha256(path: Path) -> str | None:
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _of_set(result: Result | None) -> str:
    """Return the largest squared norm and smallest squared distance of a set, if the verifier gives them."""
    told = []
    if result and result.max_squared_norm is not None:
        told.append(f"the largest squared norm is {whole_number(result.max_squared_norm)}")
    if result and result.min_squared_distance is not None:
        told.append(f"the smallest squared distance is {whole_number(result.min_squared_distance)}")
    return listed(told)


def invalid(result: Result | None) -> list[str]:
    """Return why a set is invalid, with its worst pair; [] for a valid one, or without a verdict."""
    if result is None or (result.validity == 1 and result.alarm is None):
        return []
    lines = [
        "",
        f"It is not valid: {inline(result.alarm or result.error or result.error_kind or 'no reason given', 400)}",
    ]
    if result.worst_pair is not None:
        lines += ["", f"The worst pair: {inline(json.dumps(result.worst_pair), 400)}"]
    return lines


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
    common = _common(settings)
    for setting in settings:
        means = STRATEGIES.get(setting.strategy)
        own = {key: word for key, word in _words(setting).items() if key not in common}
        lines.append(f"- **Strategy {inline(setting.label)}**{f': {means}' if means else ''}.{_told(own)}")
        lines.append(f"  {_spent(setting.logs)}")
    if common:
        several = "All settings alike" if len(settings) > 1 else "Settings"
        lines.append(f"- **{several}:**{_told(common, '')} Budgets are hard caps, which count retries.")
    lines += [f"- **Prompts:** {_prompts(logs)}", f"- **Verifier:** {_verifier(logs)}"]
    starts = sorted({f"{inline(name_in(log.start.program))} ({figure(log.start.score)})" for log in logs})
    more = [f"{len(starts) - MOST_STARTS} more"] if len(starts) > MOST_STARTS else []
    lines.append(f"- **Starting point:** {listed([*starts[:MOST_STARTS], *more])}.")
    return [*lines, "", "The first prompt, cut:", "", *quoted(one.first_prompt, QUOTED, lines=14)]


def _words(setting: SeedGroup) -> dict[str, str]:
    """Return the settings of a run as they are typed, without unset budgets."""
    told = flat(setting.logs[0].settings)
    return {
        key: f"{key}={typed_word(value)}"
        for key, value in told.items()
        if not (key.startswith("budget.") and value is None)
    }


def _common(settings: Sequence[SeedGroup]) -> dict[str, str]:
    """Return what all settings share."""
    every = [_words(setting) for setting in settings]
    return {key: word for key, word in every[0].items() if all(other.get(key) == word for other in every)}


def _told(words: Mapping[str, str], start: str = " Its own settings:") -> str:
    if not words:
        return ""
    shown = [inline(word, 60) for word in list(words.values())[:MOST_SETTINGS]]
    more = f" and {len(words) - MOST_SETTINGS} more" if len(words) > MOST_SETTINGS else ""
    return f"{start} {', '.join(shown)}{more}."


def _spent(logs: Sequence[Log]) -> str:
    calls, tokens = sum(log.spent.calls for log in logs), 0
    for log in logs:
        tokens += (log.spent.prompt_tokens or 0) + (log.spent.completion_tokens or 0)
    cost = sum(log.spent.cost or 0 for log in logs)
    estimated = sum(
        call.tokens_counted not in (None, "by the server") for log in logs for turn in log.turns for call in turn.calls
    )
    words = f"Spent: {counted(calls, 'call')}, {counted(tokens, 'token')}"
    words += f" (those of {counted(estimated, 'call')} not as the server counted them)" if estimated else ""
    words += f", cost {cost:g}" if cost else ""
    words += "" if len(logs) == 1 else f", in {len(logs)} runs"
    reasons = Counter(inline(log.ended, 120) if log.ended is not None else "it has not ended" for log in logs)
    if len(logs) == 1:
        return f"{words}. End: {next(iter(reasons))}."
    return f"{words}. Ends: {'; '.join(f'{why} ({times})' for why, times in reasons.most_common(5))}."


def _prompts(logs: Sequence[Log]) -> str:
    systems = {log.system for log in logs}
    one = next(iter(systems)) if len(systems) == 1 else None
    system = "several system prompts" if len(systems) > 1 else "a system prompt" if one else "no system prompt"
    kinds = Counter(turn.prompt_kind for log in logs for turn in log.turns)
    told = [f"{PROMPTS.get(kind) or inline(kind, 40)} {times_word(times)}" for kind, times in kinds.most_common(8)]
    hints = {log.settings["hints"] for log in logs if isinstance(log.settings.get("hints"), bool)}
    with_hints = {(True,): " with hints on known constructions", (False,): " without hints"}.get(tuple(hints), "")
    return f"{system}; the first prompt has {len(logs[0].first_prompt):,} characters{with_hints}. Sent: {listed(told)}."


def _verifier(logs: Sequence[Log]) -> str:
    results = [turn.result for log in logs for turn in log.turns if turn.result]
    results += [log.start.result for log in logs if log.start.result]
    dimensions = sorted({result.dimension for result in results if result.dimension is not None and result.validity})
    where = f" in dimension {listed([str(d) for d in dimensions])}" if dimensions else ""
    text = (
        f"each program ran in processes of its own; what counts is its set alone{where}, checked in whole numbers of "
        "any size and without a tolerance. Nothing that a program prints is believed, and an invalid set scores 0."
    )
    protections = [names for result in results if (names := _names(result.protections))]
    if not protections:
        return f"{text} The log does not name the protections that held."
    held = sorted(set.intersection(*map(set, protections)))
    return (
        f"{text} Protections that held: {listed([inline(name, 120) for name in held]) or 'not the same ones always'}."
    )


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
    rows = [[key[0], inline(key[1], 40), _meaning(key), *(f"{column[key]:,}" for column in columns)] for key in keys]
    examples = _examples([log for setting in settings for log in setting.logs])
    head = [
        "what",
        "kind",
        "meaning",
        *(inline(one.label, 60) if len(settings) > 1 else "times" for one in settings),
    ]
    lines = table(head, rows, frozenset(range(3, len(head))))
    if examples:
        lines += ["", "The first error of the most frequent kinds:", ""]
        lines += [f"- {inline(kind, 40)}: {inline(error, 200)}" for kind, error in examples]
    return lines


def _outcomes(logs: Sequence[Log]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            found.update(("call", call.outcome) for call in turn.calls if call.outcome != "ok")
            if turn.is_valid:
                found["valid set", "better than before" if turn.credit > best else "no better"] += 1
            elif turn.result is not None:
                kind = turn.result.error_kind or ("alarm" if turn.result.alarm else "invalid")
                found[ERRORS.get(kind, ("verdict",))[0], kind] += 1
            best = max(best, turn.credit)
    return found


def _meaning(key: tuple[str, str]) -> str:
    of, kind = key
    return outcome_text(kind) if of == "call" else ERRORS[kind][1] if kind in ERRORS else ""


def _examples(logs: Sequence[Log]) -> list[tuple[str, str]]:
    times: Counter[str] = Counter()
    first: dict[str, str] = {}
    for log in logs:
        for turn in log.turns:
            if turn.result and not turn.is_valid and turn.result.error:
                kind = turn.result.error_kind or "invalid"
                times[kind] += 1
                first.setdefault(kind, turn.result.error)
    return [(kind, first[kind]) for kind, _ in times.most_common(3)]


MOST_QUOTED = 3  # turns


class Moved(NamedTuple):
    """A turn that raised the best score of its run."""

    log: Log
    turn: Turn
    before: int

    @property
    def gain(self) -> int:
        """Return the increase."""
        return self.turn.credit - self.before


def most_moving(logs: Sequence[Log]) -> list[Moved]:
    """Return the turns with the largest gains, at most MOST_QUOTED, in the order of runs and turns."""
    found = []
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            if turn.credit > best:
                found.append(Moved(log, turn, best))
            best = max(best, turn.credit)
    largest = sorted(range(len(found)), key=lambda k: (-found[k].gain, k))[:MOST_QUOTED]
    return [found[k] for k in sorted(largest)]


def quotes(logs: Sequence[Log]) -> list[str]:
    """Quote the prompts and replies that raised the score most, cut and fenced."""
    moved = most_moving(logs)
    if not moved:
        return ["No reply has moved the score."]
    lines: list[str] = []
    for log, turn, before in moved:
        run = "" if len(logs) == 1 else f"{inline(log.strategy, 40)}, seed {whole_number(log.seed)}, "
        lines += ["", f"**{run}turn {turn.id}: {figure(before)} to {figure(turn.credit)}**"]
        same = turn.prompt == log.first_prompt
        lines[-1] += f" ({PROMPTS.get(turn.prompt_kind) or inline(turn.prompt_kind, 40)}{', see above' * same}). "
        lines[-1] += "The reply, cut:" if same else "The prompt and the reply, cut:"
        lines += ["", *([] if same else [*quoted(turn.prompt, QUOTED, lines=10), ""])]
        content = (turn.reply.content if turn.reply else "") or turn.program or ""
        lines += quoted(content, QUOTED, lines=20)
    return lines[1:]
