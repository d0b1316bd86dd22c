"""Of many cases alike, some at every test, and the others where there is time."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], one_in: int = 3) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; all but one in so many are marked as long."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.long] * (n % one_in > 0))
        for n, case in enumerate(cases)
    ]
