"""A task of your own with a verifier: several answers are right, so they are checked and not compared.

    cd examples
    python -m rlreason data=own_task:multiples data.options.largest=9 data.verifier=own_task model=qwen3_0_6b_base

`multiples` makes the problems; its parameters are the settings `data.options.NAME`. The verifier is this module: one
function for each form of answer, `r1_zero` (tags) and `question_only` (a box). Without one, answers are compared with
`answer` as everywhere.
"""

import random
from collections.abc import Iterator

from rlreason.grading import formats
from rlreason.grading.verifiers import graded


def multiples(count: int = 500, largest: int = 12, seed: int = 0) -> Iterator[dict[str, str]]:
    """So many different problems; a tenth of them is held out for validation."""
    all_of_them = [(d, low) for d in range(2, largest + 1) for low in range(10, 100)]
    for divisor, low in random.Random(seed).sample(all_of_them, min(count, len(all_of_them))):
        high = low + 2 * divisor
        question = f"Which number above {low} and below {high} can be divided by {divisor}? Give one."
        yield {"question": question, "answer": f"{divisor} {low} {high}", "level": str(divisor)}


def solves(answer: str, problem: str) -> bool:
    """Whether an answer is such a number. What `answer` of a row holds is up to the task."""
    divisor, low, high = map(int, problem.split())
    return answer.strip().isdecimal() and low < int(answer) < high and int(answer) % divisor == 0


def r1_zero(response: str, problem: str) -> dict[str, float]:
    """For answers in tags."""
    return graded(formats.r1_zero(response), lambda answer: solves(answer, problem))


def question_only(response: str, problem: str) -> dict[str, float]:
    """For answers in a box."""
    return graded(formats.question_only(response), lambda answer: solves(answer, problem))
