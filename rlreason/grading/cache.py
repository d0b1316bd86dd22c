"""Grades that were worked out before, so that equal (answer, ground truth) pairs cost nothing again."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlreason.types import Grade

CACHE_SIZE = 65_536
CACHE_CHARS = 4_000  # longer texts are not worth remembering
Key = tuple[Any, ...]  # of texts, the answer first


def digest(key: Key) -> str:
    """32 hex digits that stand for a pair."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class GradeCache:
    """The grades of the pairs used last, for several threads at once.

    Of pairs that a run graded before it went on from a checkpoint, it knows only that they were graded: None.
    """

    def __init__(self) -> None:
        self._grades: OrderedDict[str, Grade | None] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, keys: Iterable[Key]) -> dict[Key, Grade | None]:
        """The grades of those of the keys that are remembered."""
        with self._lock:
            return {key: self._grades[found] for key in keys if (found := digest(key)) in self._grades}

    def remember(self, used: Iterable[Key], fresh: Mapping[Key, Grade]) -> None:
        """Keep fresh grades, except failures and long texts, and those that were used again the longest."""
        with self._lock:
            for key in used:
                if (found := digest(key)) in self._grades:
                    self._grades.move_to_end(found)
            for key, grade in fresh.items():
                if grade.outcome != "error" and len(key[0]) <= CACHE_CHARS:
                    self._grades[digest(key)] = grade
            while len(self._grades) > CACHE_SIZE:
                self._grades.popitem(last=False)

    def digests(self) -> list[str]:
        """Which pairs are remembered, those used last at the end."""
        with self._lock:
            return list(self._grades)

    def put(self, digests: Sequence[str]) -> None:
        """Remember that these pairs were graded, and no others."""
        with self._lock:
            self._grades = OrderedDict.fromkeys(digests)

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that is gone."""
        self._lock = threading.Lock()
