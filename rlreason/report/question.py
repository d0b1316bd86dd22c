"""What a sweep asks, in the words of its file; or in words made from what was varied."""

import re
from collections.abc import Sequence
from pathlib import Path

from rlreason.config.sources import resource_dir

_COMMENT = re.compile(r"#\s?(.*)")


def question_of(sweep: str, axes: Sequence[str], folder: Path | None = None) -> str:
    """The question of the sweep of this name.

    It is the first one in the comment of its file in `multirun_sweeps/` (`folder`), or else its first sentence; a sweep
    that was typed has none.

    >>> question_of("mine", ["learning_rate"]), question_of("mine", [])
    ('Which learning_rate?', 'How do these runs compare?')
    >>> question_of("grpo_prompt_ablation", ["prompt"])
    'The r1_zero prompt against the bare question'
    """
    file = (folder or resource_dir("multirun_sweeps")) / f"{sweep}.yaml"
    if re.fullmatch(r"[\w-]+", sweep) and file.is_file() and (asked := first_question(file.read_text("utf-8"))):
        return asked
    if not axes:
        return "How do these runs compare?"
    return f"Which {' and '.join(axes)}?"


def first_question(text: str) -> str:
    """The first question of the comment that a file begins with, or else its first sentence, behind the first colon.

    >>> first_question("# CS336, lr: which rate is\\n# best? And why?\\na: 1")
    'Which rate is best?'
    """
    lines = []
    for line in text.splitlines():
        if (found := _COMMENT.fullmatch(line)) is None:
            break
        lines.append(found[1].strip())
    comment = " ".join(lines)
    asked = re.search(r"(?:[^.?]*?:)?\s*([^.?:]*\?)", comment) or re.search(r"(?:[^.:]*:)?\s*([^.:]{9,})", comment)
    return "" if asked is None else asked[1][:1].upper() + asked[1][1:].strip()
