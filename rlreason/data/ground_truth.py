"""Find ground truths for rows without one, and check ground truths before a run depends on them."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlreason.config.data import DataConfig, FileDataConfig
from rlreason.config.leaves import SPLITS, locate
from rlreason.data.sources import GROUND_TRUTH, Say, hub_splits, question_hash, read_split
from rlreason.errors import DataError
from rlreason.grading import Grader
from rlreason.runtime.text import few, shorten
from rlreason.types import Problem

MOST_WORDS = 5  # of an answer; more is a sentence
_PLAIN_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_ENVIRONMENT = re.compile(r"\\begin\b.*\\end\b", re.DOTALL)  # a matrix may be written in several lines


def check_ground_truths(
    problems: Sequence[Problem], grader: Grader | None, data: DataConfig, say: Say, needed: bool = True
) -> list[Problem]:
    """Name ground truths that earn no reward, and return the problems; without them with `data.bad_gold=drop`.

    Raises `DataError` where no problem can earn a reward, unless answers are not `needed`: SFT learns without them.
    Nothing is checked without a grader or for a plug-in, whose form of an answer is unknown.
    """
    if grader is None or grader.plugin:
        return list(problems)
    wrong = {problems[i].id for i in grader.unearnable([p.answer for p in problems])}
    none = [p.id for p in problems if not p.answer]
    if len(none) == len(problems) and not needed:
        say("! no validation problem has a ground truth: accuracy stays 0 and says nothing")
        return list(problems)
    if len(wrong) == len(problems):
        raise DataError(
            f"none of {len(problems)} problems has a ground truth that grades itself right, so nothing can be earned "
            f"({few([p.id for p in problems], 3)}): choose data with answers, or say where they stand (data.gold, "
            "data.fields.answer, or a file of their own: data.ground_truth)"
        )
    texts = {p.id: p.answer for p in problems if is_text(p.answer)}
    bad = [p.id for p in problems if p.id in wrong and p.answer and p.id not in texts]
    done = "dropped" if data.bad_gold == "drop" else "cannot be earned"
    for ids, what in ((none, "problems have no ground truth"), (bad, "ground truths do not grade themselves right")):
        if ids:
            say(f"! {len(ids)} of {len(problems)} {what}; {done}: {few(ids)}")
    if texts:
        example, text = next(iter(texts.items()))
        say(
            f"! {len(texts)} of {len(problems)} ground truths are several lines or a sentence, which hardly any answer "
            f"repeats, as {example}: {shorten(text, 80)!r}: say where the answer stands (data.gold, data.fields.answer)"
        )
    return [p for p in problems if p.id not in wrong or data.bad_gold == "keep"]


def is_text(answer: str) -> bool:
    r"""Whether a ground truth is several lines or a sentence, rather than an answer: six plain words are one.

    >>> is_text("She sold all of her clips in May."), is_text("10\n\nNote"), is_text(r"\text{the 3rd of May}")
    (True, True, False)
    """
    return "\n" in _ENVIRONMENT.sub("", answer.strip()) or len(_PLAIN_WORD.findall(answer)) > MOST_WORDS


def with_ground_truths(
    data: FileDataConfig, train: list[Problem], validation: list[Problem], fill: Callable[[str], str], say: Say
) -> tuple[list[Problem], list[Problem]]:
    """Look up ground truths for rows without one, where requested or needed to filter; return (train, validation).

    They are found by question in data.ground_truth, or else in the usual splits and the validation data.
    """
    wanting = sum(not p.answer for p in (*train, *validation))
    if data.ground_truth is None and (all(p.answer for p in train) or data.filter != "correct"):
        return train, validation
    if not wanting:
        say(f"! data.ground_truth={data.ground_truth} is not read: every row brings its own ground truth")
        return train, validation
    sources = _known(data) | {"the validation data": validation}
    rows, found = by_question([*train, *validation], [p for known in sources.values() for p in known], fill)
    if not found and (data.ground_truth is not None or not any(p.answer for p in train)):
        key = "data.filter=correct" if data.ground_truth is None else f"data.ground_truth={data.ground_truth}"
        raise DataError(
            f"{key}: {wanting} rows bring no ground truth, and no row with the same question in {', '.join(sources)} "
            "has one: give a file with these questions and their answers as data.ground_truth, or rows with a field "
            "ground_truth"
        )
    mark = "! " if found < wanting else ""
    say(f"{mark}{wanting} rows bring no ground truth: found by question for {found} in {', '.join(sources)}")
    return rows[: len(train)], rows[len(train) :]


def by_question(
    problems: Sequence[Problem], known: Sequence[Problem], fill: Callable[[str], str]
) -> tuple[list[Problem], int]:
    """Give problems without an answer that of the known problem they ask; return (problems, the number found).

    `fill` writes a question into the run's prompt. A whole prompt whose problem was found gets the bare question.
    """
    partners: dict[str, Problem] = {}  # of two alike, the first counts
    for p in known:
        for text in (p.question, fill(p.question)) if p.answer else ():
            partners.setdefault(question_hash(text), p)
    rows, found = list[Problem](), 0
    for p in problems:
        partner = None if p.answer else partners.get(question_hash(p.question))
        if partner is not None:  # a bare question keeps its white space
            question = p.question if p.prompt is None else partner.question
            p, found = replace(p, answer=partner.answer, question=question), found + 1
        rows.append(p)
    return rows, found


def _known(data: FileDataConfig) -> dict[str, list[Problem]]:
    """Return source -> problems with answers: data.ground_truth, or the usual splits next to the training rows."""
    train = locate(data.path, data.train)
    if data.ground_truth is not None:
        splits = [data.ground_truth]
    elif train is None:
        splits = [name for name in hub_splits(data.path or "", data.hub_config) if name != data.train]
    else:
        files = [locate(folder, name) for folder in (data.path, str(train.parent)) for name in SPLITS]
        splits = [str(file) for file in dict.fromkeys(files) if file not in (None, train)]
    found: dict[str, list[Problem]] = {}
    for split in splits:
        # of the usual splits one may hold no row that can be used
        with contextlib.nullcontext() if data.ground_truth else contextlib.suppress(DataError):
            found[split] = [problem for problem, _ in read_split(data, split, GROUND_TRUTH, traces=False)]
    return found
