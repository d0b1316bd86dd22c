"""What came of calls, programs and sets, counted by kind."""

from collections import Counter
from collections.abc import Sequence

from rlreason.report.discovery.log import Log
from rlreason.report.discovery.settings import Setting
from rlreason.report.discovery.texts import said, table
from rlreason.report.discovery.words import ERRORS, of_call

GROUPS = ("call", "program", "set", "verdict", "valid set")  # the first column of the table, in its order


def failures(settings: Sequence[Setting]) -> list[str]:
    """A table of what came of calls, programs and sets, with a column for each setting."""
    columns = [_outcomes(setting.logs) for setting in settings]
    keys = sorted({key for column in columns for key in column}, key=lambda key: (GROUPS.index(key[0]), key[1]))
    if not keys:
        return ["No call has been made yet."]
    rows = [[key[0], said(key[1], 40), _meaning(key), *(f"{column[key]:,}" for column in columns)] for key in keys]
    examples = _examples([log for setting in settings for log in setting.logs])
    head = ["what", "kind", "meaning", *(said(one.label, 60) if len(settings) > 1 else "times" for one in settings)]
    lines = table(head, rows, frozenset(range(3, len(head))))
    if examples:
        lines += ["", "The first error of the most frequent kinds:", ""]
        lines += [f"- {said(kind, 40)}: {said(error, 200)}" for kind, error in examples]
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
    return of_call(kind) if of == "call" else ERRORS[kind][1] if kind in ERRORS else ""


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
