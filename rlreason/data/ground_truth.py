"""Find ground truths for rows without one, and check ground truths before a run depends on them.

A row whose prompt contains a known question takes that problem's answer. A whole prompt is a template filled with a
question. The run's own template is tried first. In a prompt from another template, the question is the known one with
the same words around it as in other rows: an example in the prompt, or a question that is part of another, has words
around it that no other row has.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from rlreason.config.data import DataConfig
from rlreason.data.sources import question_hash
from rlreason.errors import DataError
from rlreason.grading import Grader
from rlreason.runtime.text import few, shorten
from rlreason.types import Problem

WordTuple = tuple[str, ...]

ANCHOR_WORDS = 6  # first words of a question, by which the index finds it; all of them where it has fewer
MIN_FRACTION = 0.05  # share of prompts that must have the same words around the question

MOST_WORDS = 5  # of an answer; more is a sentence
_PLAIN_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_ENVIRONMENT = re.compile(r"\\begin\b.*\\end\b", re.DOTALL)  # a matrix may be written in several lines

# What chat templates write next to a question without white space between.
_MARKER = re.compile(r"(<\|[^<>|\s]*\|>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>)")


def check_ground_truths(
    problems: Sequence[Problem], grader: Grader | None, data: DataConfig, needed: bool = True
) -> tuple[list[Problem], list[str]]:
    """Return (problems, notes); the notes name ground truths that earn no reward, dropped with `data.bad_gold=drop`.

    Raises `DataError` where no problem can earn a reward, unless answers are not `needed`: SFT learns without them.
    Nothing is checked without a grader or for a plug-in, whose form of an answer is unknown.
    """
    if grader is None or grader.plugin:
        return list(problems), []
    wrong = {problems[i].id for i in grader.unearnable([p.answer for p in problems])}
    texts = {p.id: p.answer for p in problems if is_text(p.answer)}
    none = [p.id for p in problems if not p.answer]
    if len(none) == len(problems) and not needed:
        return list(problems), ["! no validation problem has a ground truth: accuracy stays 0 and says nothing"]
    if len(wrong) == len(problems):
        what = "has a ground truth" if len(none) == len(problems) else "has a ground truth that grades itself right"
        raise DataError(
            f"none of {len(problems)} problems {what}, so nothing can be earned ({few([p.id for p in problems], 3)}): "
            "choose data with answers, or say where they stand (data.gold, data.fields.answer, or a file of their own: "
            "data.ground_truth)"
        )
    done = "dropped" if data.bad_gold == "drop" else "cannot be earned"
    notes = []
    if none:
        notes.append(f"! {len(none)} of {len(problems)} problems have no ground truth; {done}: {few(none)}")
    if texts:
        example, text = next(iter(texts.items()))
        notes.append(
            f"! {len(texts)} of {len(problems)} ground truths are several lines or a sentence, which hardly any answer "
            f"repeats, as {example}: {shorten(text, 80)!r}: say where the answer stands (data.gold, data.fields.answer)"
        )
    if bad := [p.id for p in problems if p.id in wrong and p.answer and p.id not in texts]:
        notes.append(f"! {len(bad)} of {len(problems)} ground truths do not grade themselves right; {done}: {few(bad)}")
    return [p for p in problems if p.id not in wrong or data.bad_gold == "keep"], notes


def is_text(answer: str) -> bool:
    r"""Whether a ground truth is several lines or a sentence, rather than an answer: six plain words are one.

    >>> is_text("She sold all of her clips in May."), is_text("10\n\nNote"), is_text(r"\text{the 3rd of May}")
    (True, True, False)
    """
    return "\n" in _ENVIRONMENT.sub("", answer.strip()) or len(_PLAIN_WORD.findall(answer)) > MOST_WORDS


def with_ground_truth(
    problems: Sequence[Problem], known: Sequence[Problem], fill: Callable[[str], str]
) -> tuple[list[Problem], int]:
    """Give problems without an answer that of the known problem they ask; return (problems, the number found).

    `fill` writes a question into the run's prompt. A whole prompt whose problem was found gets the bare question.
    """
    known = [p for p in known if p.answer]
    partners = _by_template(known, fill)
    wanting = [p for p in problems if not p.answer]
    found = {p.id: partner for p in wanting if (partner := partners.get(question_hash(p.question)))}
    rest = {p.id: p.question for p in wanting if p.id not in found and p.prompt is not None}
    found |= _by_place(rest, known)

    def joined(p: Problem) -> Problem:
        partner = found[p.id]  # a bare question keeps its white space
        return replace(p, answer=partner.answer, question=p.question if p.prompt is None else partner.question)

    return [joined(p) if p.id in found else p for p in problems], len(found)


def _by_template(known: Sequence[Problem], fill: Callable[[str], str]) -> dict[str, Problem]:
    """Index the known problems by question and by the run's prompt for it; of two alike, the first counts."""
    partners: dict[str, Problem] = {}
    for p in known:
        for text in (p.question, fill(p.question)):
            partners.setdefault(question_hash(text), p)
    return partners


def _by_place(prompts: Mapping[str, str], known: Sequence[Problem]) -> dict[str, Problem]:
    """Return row id -> the known problem whose question is where other rows' prompts have theirs."""
    index, texts = _Index(known), {text: _words(text) for text in set(prompts.values())}
    spans = {text: list(index.places(words)) for text, words in texts.items()}
    before = {text: _openings(words) for text, words in texts.items()}
    after = {text: _openings(words[::-1]) for text, words in texts.items()}

    def frame(text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Return hashes of the words before and after a question."""
        return before[text][span[0]], after[text][len(texts[text]) - span[1]]

    frames = [frame(text, span) for text, found in spans.items() for span in found]
    begin_alike = _counted(before.values(), {begin for begin, _ in frames})
    end_alike = _counted(after.values(), {end for _, end in frames})
    enough = min(len(texts), max(2, len(texts) * MIN_FRACTION))  # a single prompt cannot be compared
    chosen: dict[str, Problem] = {}
    for text, found in spans.items():
        ranked = []
        for start, end in found:
            begin, rest = frame(text, (start, end))
            ranked.append((min(begin_alike[begin], end_alike[rest]), end - start, start))  # of two alike, the longest
        if ranked and max(ranked)[0] >= enough:
            _, length, start = max(ranked)
            chosen[text] = index.problems[texts[text][start : start + length]]
    return {id: chosen[text] for id, text in prompts.items() if text in chosen}


class _Index:
    """An index of known questions by their words; `places` finds all of them in a text in one pass."""

    def __init__(self, known: Sequence[Problem]) -> None:
        self.problems: dict[WordTuple, Problem] = {}
        self._lengths: dict[WordTuple, set[int]] = {}  # of the questions that begin with these words
        for p in known:
            words = _words(p.question)
            self.problems.setdefault(words, p)
            self._lengths.setdefault(words[:ANCHOR_WORDS], set()).add(len(words))
        self._anchors = sorted({len(anchor) for anchor in self._lengths})

    def places(self, words: WordTuple) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every known question among the words."""
        for start in range(len(words)):
            left = len(words) - start
            for size in self._anchors:
                for length in self._lengths.get(words[start : start + size], ()) if size <= left else ():
                    if length <= left and words[start : start + length] in self.problems:
                        yield start, start + length


def _words(text: str) -> WordTuple:
    return tuple(_MARKER.sub(r" \1 ", text).split())


def _openings(words: WordTuple) -> list[int]:
    """Return hashes of the first 0, 1, 2 ... words."""
    return list(accumulate(words, lambda so_far, word: hash((so_far, word)), initial=0))


def _counted(openings: Iterable[list[int]], wanted: Set[int]) -> Counter[int]:
    """Count how many texts have each of the wanted openings."""
    return Counter(opening for text in openings for opening in text if opening in wanted)
