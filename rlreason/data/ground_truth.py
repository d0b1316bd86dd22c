"""Find ground truths for rows without one, and check ground truths before a run depends on them.

A row whose prompt is a known question in a template takes that problem's answer. The run's own template is tried first;
any other one is what all remaining prompts have in common before and behind the question.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix

from rlreason.config.data import DataConfig
from rlreason.data.sources import question_hash
from rlreason.errors import DataError
from rlreason.grading import Grader
from rlreason.runtime.text import few, shorten
from rlreason.types import Problem

MOST_WORDS = 5  # of an answer; more is a sentence
_PLAIN_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_ENVIRONMENT = re.compile(r"\\begin\b.*\\end\b", re.DOTALL)  # a matrix may be written in several lines

#: What chat templates write next to a question without white space between.
_MARKER = re.compile(r"(<\|[^<>|\s]*\|>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>)")


def check_ground_truths(
    problems: Sequence[Problem],
    grader: Grader | None,
    data: DataConfig,
    say: Callable[[str], None],
    needed: bool = True,
) -> list[Problem]:
    """Name ground truths that earn no reward, and return the problems; without them with `data.bad_gold=drop`.

    Raises `DataError` where no problem can earn a reward, unless answers are not `needed`: SFT learns without them.
    Nothing is checked without a grader or for a plug-in, whose form of an answer is unknown.
    """
    if grader is None or grader.plugin:
        return list(problems)
    wrong = {problems[i].id for i in grader.unearnable([p.answer for p in problems])}
    texts = {p.id: p.answer for p in problems if is_text(p.answer)}
    none = [p.id for p in problems if not p.answer]
    if len(none) == len(problems) and not needed:
        say("! no validation problem has a ground truth: accuracy stays 0 and says nothing")
        return list(problems)
    if len(wrong) == len(problems):
        what = "has a ground truth" if len(none) == len(problems) else "has a ground truth that grades itself right"
        raise DataError(
            f"none of {len(problems)} problems {what}, so nothing can be earned ({few([p.id for p in problems], 3)}): "
            "choose data with answers, or say where they stand (data.gold, data.fields.answer, or a file of their own: "
            "data.ground_truth)"
        )
    done = "dropped" if data.bad_gold == "drop" else "cannot be earned"
    if none:
        say(f"! {len(none)} of {len(problems)} problems have no ground truth; {done}: {few(none)}")
    if texts:
        example, text = next(iter(texts.items()))
        say(
            f"! {len(texts)} of {len(problems)} ground truths are several lines or a sentence, which hardly any answer "
            f"repeats, as {example}: {shorten(text, 80)!r}: say where the answer stands (data.gold, data.fields.answer)"
        )
    if bad := [p.id for p in problems if p.id in wrong and p.answer and p.id not in texts]:
        say(f"! {len(bad)} of {len(problems)} ground truths do not grade themselves right; {done}: {few(bad)}")
    return [p for p in problems if p.id not in wrong or data.bad_gold == "keep"]


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
    partners: dict[str, Problem] = {}  # of two alike, the first counts
    for p in known:
        for text in (p.question, fill(p.question)):
            partners.setdefault(question_hash(text), p)
    wanting = [p for p in problems if not p.answer]
    found = {p.id: partner for p in wanting if (partner := partners.get(question_hash(p.question)))}
    found |= in_common_template({p.id: p.question for p in wanting if p.id not in found and p.prompt}, known)

    def joined(p: Problem) -> Problem:
        partner = found[p.id]  # a bare question keeps its white space
        return replace(p, answer=partner.answer, question=p.question if p.prompt is None else partner.question)

    return [joined(p) if p.id in found else p for p in problems], len(found)


def in_common_template(prompts: Mapping[str, str], known: Sequence[Problem]) -> dict[str, Problem]:
    """Return row id -> the known problem that its prompt asks, in a template that all prompts share.

    Words that all prompts begin and end with belong to the template, or to each of the questions. Of all such
    templates, that of the most known questions counts. Nothing is found by fewer than two different prompts.
    """
    texts = {id: tuple(_MARKER.sub(r" \1 ", prompt).split()) for id, prompt in prompts.items()}
    different = set(texts.values())
    if len(different) < 2:
        return {}
    by_words: dict[tuple[str, ...], Problem] = {}
    for p in known:
        by_words.setdefault(tuple(_MARKER.sub(r" \1 ", p.question).split()), p)
    before = commonprefix(list(different))  # noqa: RUF071  # of words, not of characters
    after = commonprefix([words[::-1] for words in different])  # noqa: RUF071
    first, last = {words[:1] for words in by_words}, {words[-1:] for words in by_words}
    starts = [n for n in range(len(before)) if before[n : n + 1] in first] + [len(before)]
    ends = [n for n in range(len(after)) if after[n : n + 1] in last] + [len(after)]
    best: dict[str, Problem] = {}
    for start in starts:
        for end in ends:
            spans = {id: words[start : len(words) - end] for id, words in texts.items()}
            found = {id: by_words[span] for id, span in spans.items() if span in by_words}
            best = max(best, found, key=len)
    return best
