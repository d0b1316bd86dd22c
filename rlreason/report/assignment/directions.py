"""Published directions beside what was found here: agrees, disagrees, cannot tell, not comparable."""

from collections.abc import Mapping, Sequence

from rlreason.report.assignment.courses import Course, Direction
from rlreason.report.content import Table, Verdict
from rlreason.report.words import signed

NOT_RUN = "not run"
HEAD = ["question", "setting against reference", "published", "found here", "the two"]


def agreement(published: str, found: str, but: str = "") -> str:
    """What two directions say about each other; `found` is a verdict's word or outcome.

    >>> [agreement("worse", word) for word in ("worse", "diverged", "better", "same", "cannot tell")]
    ['agrees', 'agrees', 'disagrees', 'disagrees', 'cannot tell']
    >>> agreement("cannot tell", "better"), agreement("worse", "worse", "another budget"), agreement("same", "same")
    ('cannot tell', 'not comparable', 'agrees')
    """
    if but or found == "not compared":
        return "not comparable"
    if "cannot tell" in (published, found):
        return "cannot tell"
    return "agrees" if published == ("worse" if found == "diverged" else found) else "disagrees"


def verdict_of(direction: Direction, verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict on exactly the pair of settings that a direction is about; None where there is none."""
    for a, b in direction.pairs:
        wanted, against = words_of(a), words_of(b)
        for verdict in verdicts:
            setting, reference = (words_of(typed) for typed in verdict.typed)
            if setting - reference == wanted - against and against <= reference:
                return verdict
    return None


def words_of(typed: str) -> set[tuple[str, str | float]]:
    """The settings of a line as (key, value), numbers by their value: 1e-2 is 0.01.

    >>> words_of("learning_rate=1e-2 loss=grpo_clip") == words_of("loss=grpo_clip learning_rate=0.01")
    True
    """
    found: set[tuple[str, str | float]] = set()
    for word in typed.split():
        key, _, value = word.partition("=")
        try:
            found.add((key, float(value)))
        except ValueError:
            found.add((key, value))
    return found


def directions_table(course: Course, verdicts: Mapping[str, Sequence[Verdict]]) -> Table | None:
    """All published directions of a course. `verdicts`: question -> verdicts of its sweeps. None: nothing published."""
    rows = []
    for direction in course.directions:
        found = verdict_of(direction, verdicts.get(direction.question, []))
        a, b = found.typed if found is not None else (direction.setting, direction.reference)
        said = NOT_RUN if found is None else _found(found)
        word = NOT_RUN if found is None else agreement(direction.word, found.outcome or found.word, direction.but)
        published = f"{direction.word}: {direction.what}"
        pair = f"{_short(a, b)} against {_short(b, a)}"
        rows.append([direction.question, pair, published, said, _why(word, direction)])
    if not rows:
        return None
    counts = [row[-1].partition(":")[0] for row in rows]
    said = ", ".join(f"{word}: {counts.count(word)}" for word in dict.fromkeys(counts))
    note = (
        f"{said[0].upper()}{said[1:]}. The published figures are mostly of one seed of {course.model_name} on "
        f"{course.data_name}. Agreement in a direction is none in size; and where the runs here are of a small model "
        "on a made-up task, disagreement is no refutation."
    )
    return Table("Directions: published and found here", HEAD, rows, note=note)


def _found(verdict: Verdict) -> str:
    word = verdict.outcome or verdict.word
    if verdict.word == "diverged":
        word = f"{word}, it diverged" if word != "diverged" else word
    if (d := verdict.difference) is None:
        return word
    return f"{word}: {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})"


def _short(typed: str, other: str) -> str:
    """Of a setting, the words that the other has not."""
    theirs = other.split()
    return " ".join(word for word in typed.split() if word not in theirs) or typed


def _why(word: str, direction: Direction) -> str:
    return f"{word}: {direction.but}" if word == "not comparable" and direction.but else word
