"""How the runs of a report worked, in sentences that follow from their logs alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.report.discovery.log import Log
from rlreason.report.discovery.settings import Setting
from rlreason.report.discovery.texts import counted, figure, listed, name_in, quoted, said, times_word
from rlreason.report.discovery.words import PROMPTS, STRATEGIES

QUOTED = 700  # characters of the first prompt
MOST_SETTINGS = 20  # shown in a sentence
MOST_STARTS = 3  # programs to begin with


def methodology(settings: Sequence[Setting]) -> list[str]:
    """How the runs worked, in sentences that follow from their logs alone."""
    logs = [log for setting in settings for log in setting.logs]
    one = logs[0]
    problem = said(name_in(one.problem))
    lines = [
        "A language model writes whole programs, and a verifier scores the set that each one gives. The problem: "
        f"**{said(one.title) or problem}** ({problem}); the score counts {said(one.unit)}.",
        "",
        f"- **Model:** {listed(sorted({said(log.model) for log in logs}))}, through an OpenAI-compatible endpoint.",
    ]
    common = _common(settings)
    for setting in settings:
        means = STRATEGIES.get(setting.strategy)
        own = {key: word for key, word in _words(setting).items() if key not in common}
        lines.append(f"- **Strategy {said(setting.label)}**{f': {means}' if means else ''}.{_told(own)}")
        lines.append(f"  {_spent(setting.logs)}")
    if common:
        several = "All settings alike" if len(settings) > 1 else "Settings"
        lines.append(f"- **{several}:**{_told(common, '')} Budgets are hard caps, which count retries.")
    lines += [f"- **Prompts:** {_prompts(logs)}", f"- **Verifier:** {_verifier(logs)}"]
    starts = sorted({f"{said(name_in(log.start.program))} ({figure(log.start.score)})" for log in logs})
    more = [f"{len(starts) - MOST_STARTS} more"] if len(starts) > MOST_STARTS else []
    lines.append(f"- **Starting point:** {listed([*starts[:MOST_STARTS], *more])}.")
    return [*lines, "", "The first prompt, cut:", "", *quoted(one.first_prompt, QUOTED, lines=14)]


def _words(setting: Setting) -> dict[str, str]:
    """The settings of a run as they are typed, but for budgets that are not set."""
    told = flat(setting.logs[0].settings)
    return {
        key: f"{key}={typed_word(value)}"
        for key, value in told.items()
        if not (key.startswith("budget.") and value is None)
    }


def _common(settings: Sequence[Setting]) -> dict[str, str]:
    """What all of them have alike."""
    every = [_words(setting) for setting in settings]
    return {key: word for key, word in every[0].items() if all(other.get(key) == word for other in every)}


def _told(words: Mapping[str, str], start: str = " Its own settings:") -> str:
    if not words:
        return ""
    shown = [said(word, 60) for word in list(words.values())[:MOST_SETTINGS]]
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
    reasons = Counter(said(log.ended, 120) if log.ended is not None else "it has not ended" for log in logs)
    if len(logs) == 1:
        return f"{words}. End: {next(iter(reasons))}."
    return f"{words}. Ends: {'; '.join(f'{why} ({times})' for why, times in reasons.most_common(5))}."


def _prompts(logs: Sequence[Log]) -> str:
    systems = {log.system for log in logs}
    one = next(iter(systems)) if len(systems) == 1 else None
    system = "several system prompts" if len(systems) > 1 else "a system prompt" if one else "no system prompt"
    kinds = Counter(turn.prompt_kind for log in logs for turn in log.turns)
    told = [f"{PROMPTS.get(kind) or said(kind, 40)} {times_word(times)}" for kind, times in kinds.most_common(8)]
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
    return f"{text} Protections that held: {listed([said(name, 120) for name in held]) or 'not the same ones always'}."


def _names(protections: Any) -> list[str]:
    if isinstance(protections, Mapping):
        return [f"{name} ({how})" if isinstance(how, str) and how else str(name) for name, how in protections.items()]
    return [str(one) for one in protections] if isinstance(protections, list) else []
