"""The frame of every picture that a run leaves: matplotlib without a screen, a heading, and a file written whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlreason.runtime.atomic_files import whole
from rlreason.runtime.signals import held
from rlreason.runtime.text import visible

#: The formats that matplotlib can write, each by the suffix of the file.
FORMATS = ("png", "pdf", "svg", "svgz", "eps", "ps", "pgf", "jpg", "jpeg", "tif", "tiff", "webp", "raw", "rgba")


def show_as_they_are(fig: Any) -> None:
    """Headings and labels hold names that others chose: no control characters, and a dollar is no formula."""
    from matplotlib.text import Text

    numbers = {label for ax in fig.axes for label in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    for text in fig.findobj(Text):
        if text not in numbers:
            text.set_text(visible(text.get_text()))
            text.set_parse_math(False)


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Yields the axes to draw on, `size` in inches; `path` is written when the block ends, as its suffix says."""
    with held():  # an import that a signal cuts in two cannot be done again
        from matplotlib.figure import Figure  # and not pyplot, whose choice of a screen is the caller's

    fig = Figure(figsize=size, layout="constrained")
    yield fig.subplots(rows, columns)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    show_as_they_are(fig)
    with whole(path) as partial:
        fig.savefig(partial, dpi=130, format=path.suffix[1:] or "png")
