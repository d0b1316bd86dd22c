"""Fill a question into a prompt template.

Templates have `str.format` semantics, as the course's files do: `{question}` is the question, and doubled
braces stand for single ones, so `\\boxed{{}}` becomes `\\boxed{}`.
"""

from collections.abc import Sequence
from pathlib import Path

from rlreason.errors import ConfigError


def load_template(file: str, folder: Path) -> str:
    """A template by file name in `folder`, or by path; `ConfigError` unless `{question}` is its only field."""
    path = next((p for p in (folder / file, Path(file).expanduser()) if p.is_file()), None)
    if path is None:
        offered = ", ".join(sorted(p.name for p in folder.glob("*.prompt")))
        raise ConfigError(
            f"prompt.file={file} is neither in {folder} ({offered}) nor a path: give one of these, or a path"
        )
    template = path.read_text(encoding="utf-8-sig")  # an editor may begin a file with a byte-order mark
    try:
        filled = render(template, "\0")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"prompt.file={file}: a brace in it is no field ({error}): double literal braces, as in \\boxed{{{{}}}}"
        ) from error
    if "\0" not in filled:
        raise ConfigError(f"prompt.file={file} never uses the question: put {{question}} where it belongs")
    return template


def appended(whole: Sequence[int], bare: Sequence[int]) -> int:
    """How many tokens a tokenizer puts behind a text, from the text's ids with and without what it puts around it.

    `ConfigError` where the text's own ids are not among them.

    >>> appended([1, 7, 8, 2, 2], [7, 8])
    2
    """
    for start in range(len(whole) - len(bare) + 1):
        if list(whole[start : start + len(bare)]) == list(bare):
            return len(whole) - len(bare) - start
    raise ConfigError(
        "model.path: its tokenizer's post-processor changes a prompt's own tokens: remove it from tokenizer.json"
    )


def render(template: str, question: str) -> str:
    r"""The prompt for one question.

    >>> render("Q: {question} Use \\boxed{{}}.", "1+1? {}")
    'Q: 1+1? {} Use \\boxed{}.'
    """
    return template.format(question=question)
