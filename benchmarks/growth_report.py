"""How cost grows, in words, as a table and as a picture: what is made of the points that `growth.py` measures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"
LINEAR = (0.85, 1.15)  # exponents that measurements on a busy machine cannot tell from 1
FLOOR_MB = 5.0  # less is noise of the allocator


class Axis(NamedTuple):
    """What grows, and what is measured while it does."""

    name: str
    unit: str
    work: str
    sizes: tuple[int, ...]
    why: str = ""  # the reason where cost is not linear


class Point(NamedTuple):
    """The cost of one size."""

    size: int
    seconds: float  # of the processor
    memory: float  # MB above the start


class Growth(NamedTuple):
    """cost = fixed + slope x size^exponent."""

    fixed: float
    slope: float
    exponent: float

    def at(self, size: float) -> float:
        """The cost of a size."""
        return self.fixed + self.slope * size**self.exponent


def fitted(sizes: Sequence[float], costs: Sequence[float]) -> Growth:
    """The growth with the least squared relative error; no part of it is negative. At least three points.

    >>> growth = fitted([1, 2, 4, 8, 16], [5 + 2 * n**1.5 for n in (1, 2, 4, 8, 16)])
    >>> round(growth.fixed, 1), round(growth.slope, 1), growth.exponent
    (5.0, 2.0, 1.5)
    """
    best, least = Growth(costs[0], 0.0, 1.0), float("inf")
    for exponent in (step / 100 for step in range(30, 251)):
        xs = [size**exponent / cost for size, cost in zip(sizes, costs, strict=True)]
        ones = [1 / cost for cost in costs]
        xx, x1, oo = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((xs, xs), (xs, ones), (ones, ones)))
        x, o = sum(xs), sum(ones)
        determinant = xx * oo - x1 * x1
        both = ((xx * o - x1 * x) / determinant, (oo * x - x1 * o) / determinant) if determinant > 1e-15 else (-1, -1)
        for fixed, slope in (both, (0.0, x / xx)):
            error = sum((fixed * a + slope * b - 1) ** 2 for a, b in zip(ones, xs, strict=True))
            if fixed >= 0 and slope >= 0 and error < least - 1e-12:
                best, least = Growth(fixed, slope, exponent), error
    return best


def verdict(growth: Growth, axis: Axis, largest: float) -> str:
    """Linear or not, and why not; what part of the largest cost is there at any size.

    >>> axis = Axis("length", "tokens", "sampling", (1, 2, 4), "attention looks back")
    >>> verdict(Growth(0, 1, 1.3), axis, 4)
    'more than linear: attention looks back'
    >>> verdict(Growth(1, 1, 1), axis, 4)
    'linear, above a fixed part'
    """
    share = growth.fixed / growth.at(largest)
    above = ", above a fixed part" * (share > 0.05)
    if LINEAR[0] <= growth.exponent <= LINEAR[1]:
        return f"linear{above}"
    kind = "less" if growth.exponent < LINEAR[0] else "more"
    return f"{kind} than linear{above}" + (f": {axis.why}" if axis.why else "")


def table(axes: Sequence[Axis], points: Mapping[str, Sequence[Point]]) -> str:
    """The axes in Markdown."""
    lines = [
        "| grows | sizes | measured | processor seconds | fixed + slope x size^p | MB above start | cost is |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for axis in axes:
        if axis.name not in points:
            continue
        found = points[axis.name]
        growth = fitted([p.size for p in found], [p.seconds for p in found])
        first, last = found[0], found[-1]
        line = f"| {axis.name} | {first.size:,}-{last.size:,} {axis.unit} | {axis.work} "
        line += f"| {first.seconds:.2g}-{last.seconds:.2g} | {growth.fixed:.2g} + {growth.slope:.2g} "
        lines.append(
            line
            + f"n^{growth.exponent:.2f} | {first.memory:.0f}-{last.memory:.0f} | {verdict(growth, axis, last.size)} |"
        )
    return "\n".join(lines)


def draw(axes: Sequence[Axis], points: Mapping[str, Sequence[Point]], path: Path) -> None:
    """A panel for each axis: seconds and memory as multiples of those of the smallest size, beside a linear growth."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [axis for axis in axes if axis.name in points]
    columns = 5
    rows = -(-len(shown) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(15, 3.4 * rows), squeeze=False)
    for panel in panels.flat[len(shown) :]:
        panel.set_axis_off()
    for axis, panel in zip(shown, panels.flat, strict=False):
        found = points[axis.name]
        sizes = [p.size for p in found]
        panel.plot(sizes, [size / sizes[0] for size in sizes], "--", color="0.6", label="linear")
        for name, color, mark in (("seconds", "tab:blue", "o"), ("memory", "tab:orange", "s")):
            costs = [max(getattr(p, name), FLOOR_MB if name == "memory" else 1e-9) for p in found]
            panel.plot(sizes, [cost / costs[0] for cost in costs], f"{mark}-", color=color, markersize=4, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        ticks = [2**i for i in range(0, 16) if 2**i <= panel.get_ylim()[1]]
        panel.set_yticks(ticks, [f"{tick:,}x" for tick in ticks], fontsize=8)
        panel.minorticks_off()
        panel.set_title(f"{axis.name}\n{axis.work}", fontsize=9)
        panel.set_xlabel(axis.unit, fontsize=8)
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.suptitle("Cost of each size, as a multiple of the smallest one's")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def placed(page: str, text: str) -> str:
    """The page with the text between its marks. `ValueError` where it has none.

    >>> placed(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new") == f"a\\n{BEGIN}\\n\\nnew\\n\\n{END}\\nb"
    True
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no {BEGIN} and {END} to write between")
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def report(axes: Sequence[Axis], points: Mapping[str, Sequence[Point]], root: Path | None) -> None:
    """Print the table; with a root of the repository, write it and the picture into its documentation."""
    text = table(axes, points)
    print("\n" + text)
    if root is not None:
        page = root / "docs/performance.md"
        page.write_text(placed(page.read_text(encoding="utf-8"), text), encoding="utf-8")
        draw(axes, points, root / "docs/growth.png")
