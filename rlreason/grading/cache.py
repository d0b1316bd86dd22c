"""Grades that were worked out before, so that equal (answer, ground truth) pairs cost nothing again."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from rlreason.types import Grade

CACHE_SIZE = 65_536
CACHE_CHARS = 4_000  # longer texts are not worth remembering
Key = tuple[Any, ...]  # of texts, the answer first


class GradeCache:
    """The grades of the pairs used last, for several threads at once."""

    def __init__(self) -> None:
        self._grades: OrderedDict[Key, Grade] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, keys: Iterable[Key]) -> dict[Key, Grade]:
        """The grades of those of the keys that are remembered."""
        with self._lock:
            return {key: self._grades[key] for key in keys if key in self._grades}

    def remember(self, used: Mapping[Key, Grade], fresh: Mapping[Key, Grade]) -> None:
        """Keep fresh grades, except failures and long texts, and those that were used again the longest."""
        with self._lock:
            for key in used:
                if key in self._grades:
                    self._grades.move_to_end(key)
            for key, grade in fresh.items():
                if grade.outcome != "error" and len(key[0]) <= CACHE_CHARS:
                    self._grades[key] = grade
            while len(self._grades) > CACHE_SIZE:
                self._grades.popitem(last=False)

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that is gone."""
        self._lock = threading.Lock()
